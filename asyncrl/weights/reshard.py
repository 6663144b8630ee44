"""Resharding of Megatron shards to HF tensors, as a stream. At any time it holds the shards of one parameter (for
routed experts: of one expert per expert-parallel rank). They are passed on as views, and joined when they are copied.

Each parameter of a pipeline stage is gathered on the stage's first rank, the only one that sees HF tensors. Dense
parameters come from the first replica's tensor-parallel group. Routed experts come from the group of all
expert-tensor-parallel and expert-parallel ranks of the first expert replica: one gather brings the i-th expert of each
of them. Sequence parallelism, context parallelism and further replicas hold no weights of their own and take no part.

A layer may say what its weight is exported as, by a method `exported` (trainer/transformation.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.parallel import Parallel
from asyncrl.schema import POLICY
from asyncrl.weights.bucket import unit_of
from asyncrl.weights.checksum import ExpectedChecksums
from asyncrl.weights.layouts import Dims, NameRule, Pieces, stack_experts
from asyncrl.weights.mapping import Mapping, local_name

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


Found = tuple[int, str, NameRule]
"""A parameter or persistent buffer: its chunk, its name there, and its rule with the numbers of the whole model."""


class Resharder:
    """The weights of one rank's model chunks (several under virtual pipelining), converted from Megatron's layout
    to HF's."""

    checksums = ExpectedChecksums

    def __init__(self, chunks: Sequence[GPTModel], architecture: str, dims: Dims, parallel: Parallel) -> None:
        self._chunks = chunks
        self.dims = dims
        self.parallel = parallel
        te = chunks[0].config.transformer_impl == "transformer_engine"
        self.mapping = Mapping(architecture, transformer_engine=te)
        self.num_layers = chunks[0].config.num_layers
        self.num_experts = chunks[0].config.num_moe_experts or 0
        self._experts_here = self.num_experts // parallel.ep
        first = parallel.ep_rank * self._experts_here
        self.experts = range(first, first + self._experts_here)  # that this rank holds, as the layers
        self.layers = {number for chunk in chunks for number in _layers(chunk)}

    @cached_property
    def parameters(self) -> list[Found]:
        """Every parameter and persistent buffer that the folder has, which are all when it is loaded."""
        return [(number, name, self.mapping.find(of_all)) for number, name, of_all in self.names()]

    def names(self) -> Iterator[tuple[int, str, str]]:
        """Yield chunk, name and name with the numbers of the whole model of every parameter and persistent buffer."""
        for number, chunk in enumerate(self._chunks):
            for name in weights_of(chunk):
                yield number, name, _global_name(name, _layers(chunk), self.experts.start)

    def held(self) -> list[Tensor]:
        """Return every parameter and persistent buffer that the folder has, not copies."""
        states = [weights_of(chunk, keep_vars=True) for chunk in self._chunks]
        return [states[chunk][name] for chunk, name, _ in self.parameters if name in states[chunk]]

    def tensors(self, which: Sequence[Found], *, merged: str | None = None) -> Iterator[tuple[NameRule, Tensor]]:
        """Look the tensors up again for each pass: mixed precision and data parallelism move a model's memory after
        construction. A layer that says what its weight is exported as is asked for it, with `merged`."""
        states = [weights_of(chunk) for chunk in self._chunks]
        for chunk, name, found in which:
            exported = getattr(self.layer(chunk, name), "exported", None)
            if exported is None or not name.endswith(".weight"):
                yield found, states[chunk][name]
            else:
                yield found, exported(merged)

    def layer(self, chunk: int, name: str) -> torch.nn.Module:
        """Return the layer that holds a parameter."""
        return self._chunks[chunk].get_submodule(name.rpartition(".")[0])

    def degree(self, found: NameRule) -> int:
        """Return the number of ranks that share this parameter."""
        if found.routed:
            return self.parallel.etp
        return self.parallel.tp if found.layout.split else 1

    def rank(self, found: NameRule) -> int:
        """Return this rank's number among them."""
        return (self.parallel.etp_rank if found.routed else self.parallel.tp_rank) % self.degree(found)

    def is_tied_copy(self, found: NameRule) -> bool:
        """Return whether this is the last stage's copy of a tied embedding."""
        return self.dims.tied and found.megatron == "output_layer.weight"

    # -- export --------------------------------------------------------------------------------------------

    def stream(self, *, merged: str | None = POLICY) -> Iterator[tuple[str, Pieces]]:
        """Yield (HF name, full tensor in pieces) of this stage, in a fixed order, on the exporting rank, and nothing on
        other ranks. Each weight has what the model `merged` adds to it; None exports the folder's weights alone.

        Every rank must iterate to the end, because it takes part in a gather per split parameter. Pieces may be views
        of the parameter itself: read them before the next optimizer step.
        """
        return self._full(self.exported, self._gathered, merged=merged)

    def figures(self) -> dict[str, float]:
        """Return no metrics: the engines get the weights as they are."""
        return {}

    def hf_tensors(self, *, merged: str | None = POLICY) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor), with each tensor in one piece."""
        return ((name, pieces.tensor()) for name, pieces in self.stream(merged=merged))

    def whole(self, which: Sequence[Found]) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor) of these parameters, as `hf_tensors`."""
        return ((name, pieces.tensor()) for name, pieces in self._full(self._in_gathers(which), self._gathered))

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and shape of what `hf_tensors` yields, without accessing weights or other ranks."""
        if not self.parallel.exports:
            return
        for name, pieces in self._full(self.exported, self._placeholders):
            whole = pieces.tensor()
            yield name, whole.dtype, whole.shape

    @torch.no_grad()
    def _full(
        self,
        which: Sequence[Found],
        shards: Callable[[NameRule, Tensor], list[Tensor]],
        *,
        merged: str | None = None,
    ) -> Iterator[tuple[str, Pieces]]:
        """Yield the full tensors of these parameters, joined from what `shards` returns for each. Those of experts that
        HF stacks are yielded when all are there; at any time one stack is in memory."""
        stacks: dict[str, dict[int, Tensor]] = {}
        for found, tensor in self.tensors(which, merged=merged):
            joined = self._joined(found, shards(found, tensor))
            if not found.stacked:
                yield from joined
                continue
            for owner, (name, pieces) in enumerate(joined):  # one expert on each expert-parallel rank
                stack = stacks.setdefault(name, {})
                stack[(found.expert or 0) + owner * self._experts_here] = pieces.tensor()
                if len(stack) == self.num_experts:
                    experts = [stack[number] for number in range(self.num_experts)]
                    yield name, Pieces([stack_experts(found.matrix, experts)])
                    del stacks[name]

    @cached_property
    def exported(self) -> list[Found]:
        """The parameters in whose gathers this rank takes part; those that must arrive together are adjacent."""
        exported = self._in_gathers(self.parameters)
        places: dict[str, int] = {}
        units = [unit_of(found.hf_names()[0]) for _, _, found in exported]
        for place, unit in enumerate(units):
            places.setdefault(unit, place)
        return [exported[i] for i in sorted(range(len(exported)), key=lambda i: places[units[i]])]

    def _in_gathers(self, which: Sequence[Found]) -> list[Found]:
        """Return those of the first replica, without the copy of a tied embedding."""
        p, dense = self.parallel, self.parallel.dp_rank == 0 and self.parallel.cp_rank == 0
        return [one for one in which if (p.edp_rank == 0 if one[2].routed else dense) and not self.is_tied_copy(one[2])]

    def _gathered(self, found: NameRule, shard: Tensor) -> list[Tensor]:
        """Return every rank's shard on the exporting rank, and nothing elsewhere."""
        group = self.parallel.expert_group if found.routed else self.parallel.tp_group
        if group.size() == 1 or not (found.routed or found.layout.split):
            return [shard] if self.parallel.exports else []
        parts = [torch.empty_like(shard) for _ in range(group.size())] if self.parallel.exports else None
        dist.gather(shard.contiguous(), parts, group=group, group_dst=0)
        return parts or []

    def _placeholders(self, found: NameRule, shard: Tensor) -> list[Tensor]:
        """Return every rank's shard without its values."""
        count = self.degree(found) * (self.parallel.ep if found.routed else 1)
        return [torch.empty_like(shard, device="meta")] * count

    def _joined(self, found: NameRule, parts: list[Tensor]) -> Iterator[tuple[str, Pieces]]:
        """Join all shards into full tensors; for routed experts, one per expert-parallel rank in turn."""
        degree = self.degree(found)
        for owner, first in enumerate(range(0, len(parts), degree)):
            names = found.hf_names(expert_offset=owner * self._experts_here)
            yield from zip(names, found.layout.join(parts[first : first + degree], self.dims), strict=True)


def weights_of(module: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers by name, without TransformerEngine's `_extra_state`, which
    holds the scales of an FP8 recipe. With `keep_vars`, parameters are returned as such, as by `state_dict`."""
    states = module.state_dict(keep_vars=keep_vars).items()
    return {name: t for name, t in states if isinstance(t, Tensor) and not name.endswith("_extra_state")}


def _layers(chunk: GPTModel) -> list[int]:
    """Return a chunk's layers by their numbers in the whole model, from 0."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def _global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Rename from local numbers to those of the whole model: `layers` by local number, experts from `first_expert` on.
    The result is a name of the local spec."""
    name = re.sub(r"(?<=\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name, count=1)
    return re.sub(r"(?<=\.local_experts\.)\d+", lambda found: str(first_expert + int(found[0])), local_name(name))
