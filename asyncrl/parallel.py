"""Position of a trainer rank in the parallel layout, which `trainer/parallel.py` gets from Megatron, and the exchange
of objects between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class PipelineSplit:
    """Division of a model's layers among pipeline stages, as Megatron's settings of the same meaning say."""

    stages: int = 1
    chunks: int = 1  # per stage
    first: int | None = None  # layers of the first stage; None: as many as a middle one
    last: int | None = None
    embedding: bool = False  # the embedding counts as a layer of the first stage
    loss: bool = False  # the output layer counts as a layer of the last stage

    def chunk_layers(self, layers: int) -> list[list[range]]:
        """Return the layers of each chunk of each stage. Raises ValueError with the degree that does not divide
        them, and the problem."""
        if self.chunks > 1 and self.stages == 2 and self.first and self.last:
            raise ValueError(
                "virtual_pipeline", "Megatron interleaves two stages only if one of them has no own number"
            )
        per_stage = [self._of_stage(layers, stage) for stage in range(self.stages)]
        if uneven := next((size for size in per_stage if size % self.chunks), 0):
            raise ValueError("virtual_pipeline", f"{self.chunks} chunks cannot share the {uneven} layers of a stage")
        found: list[list[range]] = [[] for _ in per_stage]
        start = 0
        for chunk in range(self.chunks):
            for stage, size in enumerate(per_stage):
                end = start + size // self.chunks
                end -= self.embedding and (stage, chunk) == (0, 0)
                end -= self.loss and (stage, chunk) == (self.stages - 1, self.chunks - 1)
                found[stage].append(range(start, end))
                start = end
        return found

    def _of_stage(self, layers: int, stage: int) -> int:
        """Return the layers of a stage, embedding and output layer included if they count."""
        given = {0: self.first, self.stages - 1: self.last} if self.stages > 1 else {}
        if (own := given.get(stage)) is not None:
            return own
        middle = layers + self.embedding + self.loss - sum(size or 0 for size in given.values())
        others = self.stages - sum(size is not None for size in given.values())
        if middle <= 0 or middle % others:
            raise ValueError("pipeline_parallel", f"{others} stages cannot share {middle} layers evenly")
        return middle // others


@dataclass(frozen=True)
class EngineParallel:
    """Division of a model among the ranks of an SGLang engine: stages of `tp` ranks each, which form other groups for
    routed experts and for attention."""

    tp: int = 1
    ep: int = 1  # groups of ranks that share the routed experts; the ranks of a group divide each expert
    dp: int = 1  # replicas of attention; the ranks of a replica divide its heads
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks. Stage s has those from s * tp on."""
        return self.tp * self.pp

    @property
    def attention(self) -> int:
        """Number of ranks that divide the heads."""
        return self.tp // self.dp

    @property
    def per_expert(self) -> int:
        """Number of ranks that divide each routed expert."""
        return self.tp // self.ep

    def layers(self, count: int, stage: int) -> range:
        """Return the layers of a stage, of `count`: the last stages have one more if stages cannot share them evenly
        (sglang/srt/distributed/utils.py, get_pp_indices)."""
        ends = [count // self.pp * number + max(0, number - self.pp + count % self.pp) for number in (stage, stage + 1)]
        return range(*ends)


@dataclass(frozen=True)
class Parallel:
    """Position of this rank in the parallel layout."""

    rank: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    cp: int
    cp_rank: int
    dp: int
    dp_rank: int
    etp: int  # ranks that share each matrix of a routed expert
    etp_rank: int
    ep: int  # ranks that share the routed experts
    ep_rank: int
    edp_rank: int  # replica of the routed experts
    device: torch.device
    tp_group: dist.ProcessGroup  # the ranks that share each dense matrix
    expert_group: dist.ProcessGroup  # the ranks that together hold all routed experts of a stage
    stage_group: dist.ProcessGroup | None = None  # all ranks of a pipeline stage; None if it has only one
    cp_group: dist.ProcessGroup | None = None  # the ranks that share each sequence
    pp_group: dist.ProcessGroup | None = None  # this rank's counterparts on all pipeline stages, in their order

    @property
    def is_first(self) -> bool:
        """True for rank 0, which makes HTTP calls and writes files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True for ranks of the last pipeline stage, which hold logits and the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def counts(self) -> bool:
        """True for the one rank of each data-parallel replica's last stage whose sums enter the statistics."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def exports(self) -> bool:
        """True for the one rank of each pipeline stage that sends and saves weights.

        It is also the first rank of its expert group.
        """
        return self.dp_rank == 0 and self.cp_rank == 0 and self.tp_rank == 0


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value; waits for all ranks."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def from_first(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value, on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, 0, group)
    return values[0]
