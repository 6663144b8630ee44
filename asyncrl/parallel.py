"""Position of a trainer rank in the parallel layout. `trainer/parallel.py` gets it from Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


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
