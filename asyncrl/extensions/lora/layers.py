"""Low-rank adapters on Megatron's linear layers, one for each projection that Hugging Face has (PEFT's form).

A layer's class is swapped, not wrapped, so that the weights of the base keep their names. With scale s (arXiv
2106.09685):

    y = W x + s B A x        A [rank, in] random, B [out, rank] zero at the start

Megatron computes several projections in one layer (queries, keys and values; gate and up). Their A are stacked, and
their B stand in blocks, in the order of the layer's rows: two products per layer, whose factors also give W + s B A.

Under tensor parallelism a column-parallel layer splits the rows of B, and a row-parallel one the columns of A. What
ranks exchange has `rank` numbers for each token and projection, not `hidden`. Routed experts exchange no activations
(Megatron's dispatcher does), but the gradient of the matrix that is not split.

A layer has a `LinearAdapters` for each adapter of the run. Of several, one computes at a time (transformation.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from asyncrl.config.lora import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.weights import divides_inputs, matrix_rule, module_of, projections
from asyncrl.parallel import from_all
from asyncrl.schema import POLICY
from asyncrl.weights.layouts import QKV, ROW, Dims, NameRule
from asyncrl.weights.mapping import WHOLE_WITH_TRANSFORMER_ENGINE
from asyncrl.weights.reshard import Resharder


@dataclass(frozen=True)
class LinearShard:
    """One rank's part of a linear layer: the rank's number of those that share the layer."""

    module: Any
    found: NameRule
    degree: int
    rank: int


def linears(weights: Resharder) -> Iterator[LinearShard]:
    """Yield this rank's linear layers."""
    for chunk, name, found in weights.parameters:
        if found.linear or WHOLE_WITH_TRANSFORMER_ENGINE.search(name):
            yield LinearShard(weights.layer(chunk, name), found, weights.degree(found), weights.rank(found))


class ProjectionAdapter(nn.Module):
    """The two matrices of one projection."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(B)


class LinearAdapters(nn.ModuleDict):
    """One adapter of a linear layer: matrices by HF's names of the layer's projections."""

    skipped = False
    """True while the base computes alone, or with another adapter."""

    def __init__(
        self, shard: LinearShard, names: Sequence[str], settings: LoraConfig, dims: Dims, adapter: str
    ) -> None:
        super().__init__()
        self.adapter = adapter
        linear, rule = shard.module, shard.found
        # Of more ranks than key-value heads, each has a part of one head's rows, and all hold every B.
        self._shared = rule.layout is QKV and shard.degree > dims.kv_heads
        self._layout = rule.layout
        self._dims = dims if self._shared else _of_rank(dims, shard.degree)
        self._part = (shard.degree, shard.rank) if self._shared else (1, 0)
        self._rows = divides_inputs(rule)
        self._expert = rule.routed
        self._degree = shard.degree
        self._group = getattr(linear, "_tp_group", None) or linear.tp_group  # TransformerEngine's layers have both
        self._sequence = linear.config.sequence_parallel
        self._scale = settings.scale
        self._dropout = settings.dropout
        self._widths = _widths(shard, self._part[0], self._dims)
        self._axes = {"A": 1} if self._rows else {"B": 0} if rule.layout.split and not self._shared else {}
        for name in names:
            zero = linear.weight.new_zeros(self._widths[name], settings.rank)
            pair = self[name] = ProjectionAdapter(_start(shard, name, settings, dims, adapter), zero)
            self._mark(pair, shard.rank)

    def pairs(self) -> dict[str, ProjectionAdapter]:
        """Return the adapters by name."""
        return cast(dict[str, ProjectionAdapter], dict(self.items()))

    def _mark(self, adapter: ProjectionAdapter, rank: int) -> None:
        """Tell Megatron which matrices ranks share out, for the sum of gradients and for their norm."""
        for matrix, parameter in cast(Iterator[tuple[str, Any]], adapter.named_parameters()):
            split = matrix in self._axes
            if self._expert:
                parameter.tensor_model_parallel, parameter.shared = True, rank > 0 and not split
            elif split:
                parameter.tensor_model_parallel = True
            elif not (self._shared and matrix == "B"):  # whose gradient `factors` sums
                parameter.sequence_parallel = self._sequence

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [R, in] and B [out, R] of all projections, whose product has the layout of the layer's weight."""
        pairs = self.pairs()
        if len(self._widths) == 1:
            (only,) = pairs.values()
            return only.A, only.B
        every = torch.cat([pair.A for pair in pairs.values()])
        blocks, start = [], 0
        for name, width in self._widths.items():
            block = pairs[name].B if name in pairs else every.new_zeros(width, 0)
            block = self._copied(block) if self._shared else block
            end = start + block.shape[1]
            blocks.append(F.pad(block, (start, len(every) - end)))
            start = end
        return every, self._layout.shard(blocks, *self._part, self._dims)

    def delta(self) -> Tensor:
        """Return s B A in float32, in the layout of the layer's weight."""
        a, b = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in self.factors())
        return self._scale * (b @ a)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y + s B A x, with dropout of x in training mode."""
        a, b = self.factors()
        if self._expert and self._degree > 1:
            a, b = (a, self._copied(b)) if self._rows else (self._copied(a), b)
        inner = F.linear(self._dropped(x), a)
        if self._degree > 1 and not self._expert:
            inner = self._exchanged(inner)
        return torch.addmm(y.flatten(0, -2), inner.flatten(0, -2), b.t(), alpha=self._scale).view_as(y)

    def _copied(self, whole: Tensor) -> Tensor:
        """Return the tensor; its gradient is summed over the ranks that share the layer."""
        return copy_to_tensor_model_parallel_region(whole, group=self._group)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """Gather the tokens of a column-parallel layer, or sum the parts of a row-parallel one."""
        if self._rows:
            reduce = reduce_scatter_to_sequence_parallel_region if self._sequence else None
            return (reduce or reduce_from_tensor_model_parallel_region)(inner, group=self._group)
        return gather_from_sequence_parallel_region(inner, group=self._group) if self._sequence else self._copied(inner)

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop inputs. Ranks draw the same mask for tokens and features that they all have, and different ones for
        those that they share out."""
        if not (self.training and self._dropout):
            return x
        with get_cuda_rng_tracker().fork() if self._rows or self._sequence or self._expert else nullcontext():
            return F.dropout(x, self._dropout)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's description of the adapters' places in the whole model."""
        states: dict[str, Any] = {}
        for name, adapter in self.pairs().items():
            mine = f"{prefix}{name}."
            groups = {"tp_group": self._group, "dp_cp_group": metadata["dp_cp_group"]}
            states |= make_sharded_tensors_for_checkpoint(
                adapter.state_dict(keep_vars=True), mine, self._axes, sharded_offsets, **groups
            )
            if self._expert and not self._rows:  # gate above up
                states[f"{mine}B"] = apply_swiglu_sharded_factory(states[f"{mine}B"], sharded_offsets)
        return states


class AdaptedLinear(nn.Module):
    """Put before the class of a linear layer that has adapters as modules (`module_of`)."""

    weight: Tensor

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        y, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        for lora in self._loras():
            y = y if lora.skipped else lora(x, y)
        return y, bias

    def exported(self, merged: str | None) -> Tensor:
        """Return the weight as it is exported: dequantized if it is quantized, and with the adapter `merged` added
        if there is one."""
        packed = getattr(self, "packed", None)
        weight: Tensor = self.weight.detach() if packed is None else packed.dequantized()
        adapters = getattr(self, module_of(merged), None) if merged else None
        if adapters is None:
            return weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        return (weight.to(exact) + adapters.delta()).to(weight.dtype)

    def _loras(self) -> list[LinearAdapters]:
        return [module for module in self.children() if isinstance(module, LinearAdapters)]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the layer's own states, with those of the adapters in place of Megatron's default for them."""
        states: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        for lora in self._loras():
            states |= lora.sharded_state_dict(f"{prefix}{module_of(lora.adapter)}.", sharded_offsets, metadata)
        return states


@cache
def _adapted(of: Any) -> Any:
    return type(f"Adapted{of.__name__}", (AdaptedLinear, of), {})


def add(chunks: Sequence[GPTModel], weights: Resharder, settings: LoraConfig, adapters: Sequence[str]) -> None:
    """Freeze the weights, and add adapters of these names to the linear layers that the settings name. Raises
    ConfigError if the model lacks one of the layers."""
    known: set[str] = set()
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process and chunk.config.recompute_granularity:
            chunk.embedding.register_forward_hook(_with_gradient)
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):  # TransformerEngine would look for the weight's buffer
                module.fuse_wgrad_accumulation = False
    for shard in list(linears(weights)):
        every = [*projections(shard.found)]
        known |= {*every}
        names = [name for name in every if settings.targets == "all" or name in settings.targets]
        if names:
            for adapter in adapters:
                setattr(shard.module, module_of(adapter), LinearAdapters(shard, names, settings, weights.dims, adapter))
            shard.module.__class__ = _adapted(type(shard.module))  # type: ignore[arg-type]
    if settings.targets != "all":
        _check_targets(settings.targets, chunks, known)


def _check_targets(targets: Sequence[str], chunks: Sequence[GPTModel], known: set[str]) -> None:
    """Refuse names of no layer of any stage, and stages that would train nothing. Collective. Raises ConfigError."""
    stages = from_all(known)
    if missing := {*targets}.difference(*stages):
        others = sorted(set().union(*stages))
        remedy = f"The model has no linear layer {', '.join(sorted(missing))}: use some of {others}, or all."
        raise ConfigError("trainer.lora.targets", targets, remedy)
    if not all(any(modules([chunk])) for chunk in chunks):
        remedy = "A pipeline stage has none of these layers and would train nothing: add others, or use fewer stages."
        raise ConfigError("trainer.lora.targets", targets, remedy)


def _with_gradient(_: Any, __: Any, embedded: Tensor) -> Tensor:
    """Let the embedding's output require a gradient. Otherwise recomputation would lose every gradient of the layers
    that it runs again: Megatron's checkpoint has outputs without gradient if no input requires one."""
    return embedded.requires_grad_()


def modules(chunks: Sequence[GPTModel]) -> Iterator[LinearAdapters]:
    """Yield the adapters of all linear layers."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, LinearAdapters))


def _of_rank(dims: Dims, degree: int) -> Dims:
    """Return the dimensions of one rank's part, of which `QKV.shard` makes its rows of queries, keys and values."""
    return replace(dims, heads=dims.heads // degree, kv_heads=dims.kv_heads // degree)


def _widths(shard: LinearShard, parts: int, dims: Dims) -> dict[str, int]:
    """Return how many rows of the layer's weight, or of all `parts` of it, belong to each projection, in HF's order."""
    weight, rule = shard.module.weight, shard.found
    names = [*projections(rule)]
    if len(names) == 1:
        return {names[0]: len(weight)}
    whole = rule.layout.join([torch.empty_like(weight, device="meta")] * parts, dims)
    return {name: len(pieces.tensor()) for name, pieces in zip(names, whole, strict=True)}


def _start(shard: LinearShard, name: str, settings: LoraConfig, dims: Dims, adapter: str) -> Tensor:
    """Return this rank's part of a random A, which is the same in every layout, and another one for each adapter."""
    found, weight = shard.found, shard.module.weight
    layout, rank = matrix_rule(found, name, "A").layout, settings.rank or 0
    width = weight.shape[1] * (shard.degree if layout is ROW else 1)
    key = f"{found.megatron.format(layer=found.layer, expert=found.expert)} {name}"
    key += "" if adapter == POLICY else f" {adapter}"
    draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    whole = torch.empty(rank, width)
    if settings.init == "gaussian":
        whole.normal_(0, 1 / rank, generator=draw)
    else:
        whole.uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=draw)
    return layout.shard([whole], shard.degree, shard.rank, dims).to(weight).contiguous()
