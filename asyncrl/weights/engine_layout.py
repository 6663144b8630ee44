"""Mapping from HF tensors to the parameters of an SGLang engine, and their split over its ranks.

The tables are those of models/families, and how parameters are divided was read from SGLang 0.5.21: the weight loaders
of layers/linear.py, layers/vocab_parallel_embedding.py and layers/moe/fused_moe_triton/layer.py. A fused parameter is
the concatenation of its HF tensors, each cut for the rank, so that its bytes are known part by part.

An engine on CPU pads dimensions that are not divisible (configs/update_config.py); one on a GPU replicates key-value
heads and refuses everything else. Of the ranks of a pipeline stage, the consecutive ones of a group hold the same
routed experts, or the same replica of attention (runtime_context.py, derive_spawn_ranks). The input embedding is cut
like attention, and the output layer, like MLPs, over the whole stage. Weights that the engine quantizes itself, or
packs for AMX, are not known here. On CPU, several shared experts must have an inner size that needs no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.models.families import family_of
from asyncrl.models.family import Family, Layout, WeightRow
from asyncrl.models.parts import EMBEDDING, HEAD
from asyncrl.parallel import EngineParallel
from asyncrl.weights.layouts import dims_of
from asyncrl.weights.mapping import without_numbers

VOCAB_MULTIPLE = 64
CPU_INNER_MULTIPLE = 32  # multiplied by the ranks of a stage


@dataclass(frozen=True)
class Split:
    """One engine's ranks, and the head counts of its model before padding."""

    shape: EngineParallel
    heads: int
    kv_heads: int
    cpu: bool

    def share(self, length: int, ranks: int, multiple: int = 1) -> int:
        """Return the share of each of `ranks` ranks in a dimension, padded on CPU to `multiple` for each rank of the
        stage. Raises ValueError if it is not divisible."""
        if self.cpu:
            return _up(length, multiple * self.shape.tp) // ranks
        if length % ranks:
            raise ValueError(f"{length} does not divide among {ranks} ranks of an engine")
        return length // ranks

    @property
    def kv_replicas(self) -> int:
        """Number of ranks of a replica of attention that hold the same key-value head."""
        return 1 if self.cpu else max(1, self.shape.attention // self.kv_heads)

    @property
    def kv_heads_here(self) -> int:
        """Key-value heads of a rank."""
        return 1 if self.kv_replicas > 1 else self.share(self.kv_heads, self.shape.attention)

    @property
    def heads_here(self) -> int:
        """Query heads of a rank. Padding preserves the number of queries per key."""
        return (
            self.kv_heads_here * (self.heads // self.kv_heads)
            if self.cpu
            else self.share(self.heads, self.shape.attention)
        )


Cut = Callable[[Tensor, Split, int], Tensor]
"""Maps (full HF tensor, split, rank of the stage) to that rank's part, which is a view if nothing is padded."""


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _slice(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Return the index-th slice of `size`, with zeros beyond the end of the tensor."""
    start = min(index * size, tensor.shape[dim])
    piece = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    missing = list(piece.shape)
    missing[dim] = size - piece.shape[dim]
    return torch.cat([piece, piece.new_zeros(missing)], dim) if missing[dim] else piece


def _heads(tensor: Tensor, dim: int, total: int, index: int, count: int) -> Tensor:
    """Return the index-th group of `count` heads of `total`."""
    if tensor.shape[dim] % total:
        raise ValueError(f"its dimension {dim} has size {tensor.shape[dim]}, which {total} heads do not divide")
    return _slice(tensor, dim, index, count * (tensor.shape[dim] // total))


def _vocab(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _rows(tensor, split.shape.tp, rank)


def _embedding(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _rows(tensor, split.shape.attention, rank % split.shape.attention)


def _rows(tensor: Tensor, ranks: int, index: int) -> Tensor:
    length = tensor.shape[0]
    multiple = VOCAB_MULTIPLE * ranks if _up(length, VOCAB_MULTIPLE) % ranks else VOCAB_MULTIPLE
    return _slice(tensor, 0, index, _up(length, multiple) // ranks)


def _whole(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return tensor


def _query(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 0, split.heads, rank % split.shape.attention, split.heads_here)


def _key(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 0, split.kv_heads, rank % split.shape.attention // split.kv_replicas, split.kv_heads_here)


def _out(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 1, split.heads, rank % split.shape.attention, split.heads_here)


def _inner(dim: int, *, routed: bool = False) -> Cut:
    def cut(tensor: Tensor, split: Split, rank: int) -> Tensor:
        ranks = split.shape.per_expert if routed else split.shape.tp
        return _slice(tensor, dim, rank % ranks, split.share(tensor.shape[dim], ranks, CPU_INNER_MULTIPLE))

    return cut


_inner_rows, _inner_columns = _inner(0), _inner(1)
_expert_rows, _expert_columns = _inner(0, routed=True), _inner(1, routed=True)


def _fused_qkv(tensor: Tensor, split: Split, rank: int) -> Tensor:
    each = tensor.shape[0] // (split.heads + 2 * split.kv_heads)
    query, key, value = tensor.split([split.heads * each, split.kv_heads * each, split.kv_heads * each])
    return torch.cat([_query(query, split, rank), _key(key, split, rank), _key(value, split, rank)])


def _fused_gate_up(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return torch.cat([_inner_rows(half, split, rank) for half in tensor.chunk(2)])


def _of_stack(dim: int | None, matrices: int = 1) -> Cut:
    """Return the cut of a stack of all experts, which engines hold transposed, with its inner dimension divided, in
    which several matrices may follow one another. A bias without one is zero on all ranks of an expert but the
    first."""

    def cut(tensor: Tensor, split: Split, rank: int) -> Tensor:
        group, within = divmod(rank % split.shape.tp, split.shape.per_expert)
        mine = tensor.chunk(split.shape.ep)[group]
        if dim is None:
            return mine if within == 0 else torch.zeros_like(mine)
        ranks, each = split.shape.per_expert, mine.transpose(1, -1).chunk(matrices, dim)
        inner = split.share(each[0].shape[dim], ranks, CPU_INNER_MULTIPLE)
        return torch.cat([_slice(one, dim, within, inner) for one in each], dim)

    return cut


@dataclass(frozen=True)
class EngineParameter:
    """One engine parameter: its HF tensors in the order of their bytes. `{layer}` and `{expert}` stand for numbers; the
    parts of a rule with `{expert}` repeat for each expert in turn."""

    engine: str
    parts: tuple[tuple[str, Cut], ...]
    dtype: torch.dtype | None = None
    """The engine's own dtype, if it is not the one that the engine was started with."""

    @property
    def per_expert(self) -> bool:
        """True if the parameter stacks the tensors of all routed experts."""
        return "{expert}" in self.parts[0][0]

    @property
    def same_everywhere(self) -> bool:
        """True if all ranks hold the same bytes."""
        return all(cut is _whole for _, cut in self.parts) and not self.per_expert


Table = tuple[EngineParameter, ...]
CUTS: dict[Layout, tuple[Cut, ...]] = {
    Layout.WHOLE: (_whole,),
    Layout.COLUMN: (_whole,),
    Layout.WHOLE_EMBEDDING: (_whole,),
    Layout.EMBEDDING: (_embedding,),
    Layout.HEAD: (_vocab,),
    Layout.QKV: (_query, _key, _key),
    Layout.QUERY: (_query,),
    Layout.OUT: (_out,),
    Layout.GATE_UP: (_inner_rows, _inner_rows),
    Layout.DOWN: (_inner_columns,),
    Layout.FUSED_QKV: (_fused_qkv,),
    Layout.FUSED_GATE_UP: (_fused_gate_up,),
}
"""How an engine cuts the HF tensors of a weight."""
CUTS_OF_EXPERTS: dict[Layout, tuple[Cut, ...]] = {
    Layout.GATE_UP: (_expert_rows, _expert_rows),
    Layout.DOWN: (_expert_columns,),
    Layout.STACKED_GATE_UP: (_of_stack(1, matrices=2),),
    Layout.INTERLEAVED_GATE_UP: (_of_stack(1),),
    Layout.STACKED_DOWN: (_of_stack(2),),
    Layout.WHOLE: (_of_stack(None),),
}


def table(family: Family, hf: dict[str, Any]) -> Table:
    """Return the engine's parameters of a model. A fused one, of which config.json sets to null what some parts need,
    has the name of the part that is left."""
    if not family.serving.fuses:
        apart = (part for one in family.weights if one.engine for part in zip(one.hf, _cuts(one), strict=True))
        return tuple(EngineParameter(name, ((name, cut),)) for name, cut in apart)
    found = []
    for name in dict.fromkeys(one.engine for one in family.weights if one.engine):
        fused = [one for one in family.weights if one.engine == name]
        here = [one for one in fused if hf.get(one.needs, one) is not None]
        parts = [part for one in here for part in zip(one.hf, _cuts(one), strict=True)]
        if parts:
            dtype = torch.float32 if here[0].exact else None
            found.append(EngineParameter(name if here == fused else parts[0][0], tuple(parts), dtype))
    tower = family.tower.engine if family.tower else ()
    return (*found, *(EngineParameter(name, tuple((part, _whole) for part in parts)) for name, parts in tower))


def _cuts(weight: WeightRow) -> tuple[Cut, ...]:
    return (CUTS_OF_EXPERTS if "{expert}" in weight.megatron else CUTS)[weight.layout]


@dataclass(frozen=True)
class ParameterTarget:
    """Destination of an HF tensor: the engine parameter's full name, its rule, which of its `count` parts the tensor
    is, and the ranks of the engine that have the parameter."""

    parameter: str
    rule: EngineParameter
    index: int
    count: int
    ranks: range


class EngineLayout:
    """The table of one model, looked up by HF name. Raises ConfigError for an unknown family."""

    def __init__(self, hf: dict[str, Any], shape: EngineParallel, *, cpu: bool) -> None:
        dims, self._family = dims_of(hf), family_of(hf)
        self.rules = table(self._family, hf)
        self.split = Split(shape, dims.heads, dims.kv_heads, cpu)
        self.tied, self._layers = dims.tied, int(hf.get("num_hidden_layers") or 0)
        self._routed = int(hf.get("n_routed_experts") or hf.get("num_local_experts") or hf.get("num_experts") or 0)
        one_shared = not cpu and shape.ep == 1 and hf.get("n_shared_experts") == 1
        self._shared_is_routed = one_shared and self._family.serving.fuses_shared_expert(hf)
        self._experts = self._routed + self._shared_is_routed
        self._places: dict[str, tuple[EngineParameter, int]] = {}
        self.add(self.rules)

    def add(self, rules: Table) -> None:
        """Add parameters, by the names of their HF tensors."""
        self._places |= {name: (rule, index) for rule in rules for index, (name, _) in enumerate(rule.parts)}

    def find(self, name: str) -> ParameterTarget:
        """Return the place of an HF tensor. Raises WeightsError if the engine has none."""
        renamed = name.replace(".shared_experts.", f".experts.{self._routed}.") if self._shared_is_routed else name
        general, numbers = without_numbers(renamed)
        layer, expert = numbers.get("layer"), numbers.get("expert", 0)
        if general not in self._places or expert >= max(self._experts, 1):
            raise WeightsError(f"{name}: an SGLang engine of {self._family.architecture} has no place for this tensor")
        rule, index = self._places[general]
        parameter, each = rule.engine.format(**numbers), len(rule.parts)
        count = each * (self._experts if rule.per_expert else 1)
        return ParameterTarget(parameter, rule, index + each * expert, count, self._ranks(name, layer))

    def part(self, target: ParameterTarget, number: int, tensor: Tensor, rank: int) -> Tensor | None:
        """Return what a rank has of one of the parameter's parts; None if it has none of this expert. Raises
        ValueError if the tensor is not divisible."""
        expert, kind = divmod(number, len(target.rule.parts))
        rank %= self.split.shape.tp
        if (
            target.rule.per_expert
            and rank // self.split.shape.per_expert != expert * self.split.shape.ep // self._experts
        ):
            return None
        return target.rule.parts[kind][1](tensor, self.split, rank)

    def _ranks(self, name: str, layer: int | None) -> range:
        """Return the ranks of the stages that have this tensor: those of its layer, of the first or of the last."""
        shape = self.split.shape
        stages = range(shape.pp)
        if layer is not None and shape.pp > 1:
            stages = next(stages[s : s + 1] for s in stages if layer in shape.layers(self._layers, s))
        elif name == EMBEDDING:
            stages = stages[:1]
        elif name != HEAD or not self._family.serving.head_everywhere:
            stages = stages[-1:]
        return range(stages.start * shape.tp, stages.stop * shape.tp)
