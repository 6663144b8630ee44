"""Resharding between Megatron shards and HF tensors, as a stream. At any time it holds the shards of one parameter (for
routed experts: of one expert per expert-parallel rank). They are passed on as views, and joined when they are copied.

Export: each parameter of a pipeline stage is gathered on the stage's first rank, the only one that sees HF tensors.
Dense parameters come from the first replica's tensor-parallel group. Routed experts come from the group of all
expert-tensor-parallel and expert-parallel ranks of the first expert replica: one gather brings the i-th expert of each
of them. Sequence parallelism, context parallelism and further replicas hold no weights of their own and take no part.

Import: each rank reads what its parameters need; nothing is communicated.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.parallel import Parallel
from asyncrl.weights.folder import HFFolder
from asyncrl.weights.layouts import Dims, Pieces
from asyncrl.weights.names import Found, Mapping, local_name, unit_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Resharder:
    """The weights of one rank's model chunks (several under virtual pipelining), converted between Megatron's layout
    and HF's."""

    def __init__(self, chunks: Sequence[GPTModel], architecture: str, dims: Dims, parallel: Parallel) -> None:
        self._chunks, self._dims, self._parallel = chunks, dims, parallel
        te = chunks[0].config.transformer_impl == "transformer_engine"
        self._mapping = Mapping(architecture, transformer_engine=te)
        self._num_layers = chunks[0].config.num_layers
        self._num_experts = chunks[0].config.num_moe_experts or 0
        self._experts_here = self._num_experts // parallel.ep
        self._first_expert = parallel.ep_rank * self._experts_here
        self._layers_here = {number for chunk in chunks for number in _layers(chunk)}

    @cached_property
    def _found(self) -> list[tuple[int, str, Found]]:
        """Every parameter and persistent buffer: chunk, name, and its rule with the numbers of the whole model."""
        return [
            (number, name, self._mapping.find(_global_name(name, _layers(chunk), self._first_expert)))
            for number, chunk in enumerate(self._chunks)
            for name in weights_of(chunk)
        ]

    def _tensors(self, which: list[tuple[int, str, Found]]) -> Iterator[tuple[Found, Tensor]]:
        """Look the tensors up again for each pass: mixed precision and data parallelism move a model's memory after
        construction."""
        states = [weights_of(chunk) for chunk in self._chunks]
        return ((found, states[chunk][name]) for chunk, name, found in which)

    def _degree(self, found: Found) -> int:
        """Return the number of ranks that share this parameter."""
        if found.rule.expert:
            return self._parallel.etp
        return self._parallel.tp if found.rule.layout.split else 1

    def _is_tied_copy(self, found: Found) -> bool:
        """Return whether this is the last stage's copy of a tied embedding."""
        return self._dims.tied and found.rule.megatron == "output_layer.weight"

    # -- export --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Pieces]]:
        """Yield (HF name, full tensor in pieces) of this stage, in a fixed order, on the exporting rank, and nothing on
        other ranks.

        Every rank must iterate to the end, because it takes part in a gather per split parameter. Pieces may be views
        of the parameter itself: read them before the next optimizer step.
        """
        for found, tensor in self._tensors(self._exported):
            yield from self._joined(found, self._gathered(found, tensor))

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor), with each tensor in one piece."""
        return ((name, pieces.tensor()) for name, pieces in self.stream())

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and shape of what `hf_tensors` yields, without accessing weights or other ranks."""
        if not self._parallel.exports:
            return
        for found, tensor in self._tensors(self._exported):
            shards = self._degree(found) * (self._parallel.ep if found.rule.expert else 1)
            for name, pieces in self._joined(found, [torch.empty_like(tensor, device="meta")] * shards):
                whole = pieces.tensor()
                yield name, whole.dtype, whole.shape

    @cached_property
    def _exported(self) -> list[tuple[int, str, Found]]:
        """The parameters in whose gathers this rank takes part; those that must arrive together are adjacent."""
        p = self._parallel
        exported = []
        for chunk, name, found in self._found:
            first_replica = p.edp_rank == 0 if found.rule.expert else p.dp_rank == 0 and p.cp_rank == 0
            if first_replica and not self._is_tied_copy(found):
                exported.append((chunk, name, found))
        places: dict[str, int] = {}
        units = [unit_of(found.hf_names()[0]) for _, _, found in exported]
        for place, unit in enumerate(units):
            places.setdefault(unit, place)
        return [exported[i] for i in sorted(range(len(exported)), key=lambda i: places[units[i]])]

    def _gathered(self, found: Found, shard: Tensor) -> list[Tensor]:
        """Return every rank's shard on the exporting rank, and nothing elsewhere."""
        group = self._parallel.expert_group if found.rule.expert else self._parallel.tp_group
        if group.size() == 1 or not (found.rule.expert or found.rule.layout.split):
            return [shard] if self._parallel.exports else []
        parts = [torch.empty_like(shard) for _ in range(group.size())] if self._parallel.exports else None
        dist.gather(shard.contiguous(), parts, group=group, group_dst=0)
        return parts or []

    def _joined(self, found: Found, parts: list[Tensor]) -> Iterator[tuple[str, Pieces]]:
        """Join all shards into full tensors; for routed experts, one per expert-parallel rank in turn."""
        degree = self._degree(found)
        for owner, first in enumerate(range(0, len(parts), degree)):
            names = found.hf_names(expert_offset=owner * self._experts_here)
            yield from zip(names, found.rule.layout.join(parts[first : first + degree], self._dims), strict=True)

    # -- import --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Fill this rank's weights from an HF folder. Raises WeightsError with a tensor that is missing, left over or
        of another shape."""
        with HFFolder(folder) as source:
            for found, tensor in self._tensors(self._found):
                names = ("model.embed_tokens.weight",) if self._is_tied_copy(found) else found.hf_names()
                degree = self._degree(found)
                whole = found.rule.layout.join([torch.empty_like(tensor, device="meta")] * degree, self._dims)
                full = [source.read(name, meta.tensor().shape) for name, meta in zip(names, whole, strict=True)]
                rank = self._parallel.etp_rank if found.rule.expert else self._parallel.tp_rank
                tensor.copy_(found.rule.layout.shard(full, degree, rank % degree, self._dims))
            source.check_nothing_left(self._mapping, self._is_for_this_rank)
            dropped = source.mtp_names()
        if dropped and self._parallel.is_first:
            warnings.warn(
                f"{folder}: left out {len(dropped)} tensors of multi-token prediction: {dropped}", stacklevel=2
            )

    def _is_for_this_rank(self, hf_name: str) -> bool:
        """Return whether an HF tensor belongs to a layer and an expert that this rank holds, or that no rank holds."""
        layer, expert = (re.search(rf"\.{kind}\.(\d+)\.", hf_name) for kind in ("layers", "experts"))
        if layer is None:
            return False
        experts = range(self._first_expert, self._first_expert + self._experts_here)
        return (int(layer[1]) in self._layers_here or int(layer[1]) >= self._num_layers) and (
            expert is None or int(expert[1]) in experts or int(expert[1]) >= self._num_experts
        )


def weights_of(module: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers by name, without TransformerEngine's `_extra_state`, which
    holds the scales of an FP8 recipe. With `keep_vars`, parameters are returned as such, as by `state_dict`."""
    states = module.state_dict(keep_vars=keep_vars).items()
    return {name: t for name, t in states if isinstance(t, Tensor) and not name.endswith("_extra_state")}


def _layers(chunk: GPTModel) -> list[int]:
    """Return a chunk's layers by their numbers in the whole model, from 0."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def _global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Rename from local numbers to those of the whole model: `layers` by local number, experts from `first_expert`
    on. The result is a name of the local spec."""
    name = re.sub(r"(?<=\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name, count=1)
    return re.sub(r"(?<=\.local_experts\.)\d+", lambda found: str(first_expert + int(found[0])), local_name(name))
