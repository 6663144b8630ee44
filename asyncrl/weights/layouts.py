"""Layouts of full HF tensors in one rank's Megatron parameter: `shard` cuts them, `join` reassembles them. Which
parameter has which, and of which tensors, is in mapping.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.models.family import Layout


@dataclass(frozen=True)
class Dims:
    """The dimensions of a model that layouts need."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool


def dims_of(hf: dict[str, Any]) -> Dims:
    """Read the dimensions from an HF config, with its defaults."""
    heads = hf["num_attention_heads"]
    return Dims(
        heads,
        hf.get("num_key_value_heads") or heads,
        hf.get("head_dim") or hf["hidden_size"] // heads,
        hf["vocab_size"],
        bool(hf.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True)
class Pieces:
    """A full tensor as views of its shards, concatenated along `dim` only on demand."""

    parts: list[Tensor]
    dim: int = 0

    def tensor(self) -> Tensor:
        """Return the full tensor. A single piece is returned without a copy."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, self.dim)

    def copy_to(self, place: Tensor) -> None:
        """Copy into a bucket, which is the only copy between a shard and a bucket."""
        if len(self.parts) == 1:
            place.copy_(self.parts[0])
        else:
            torch.cat(self.parts, self.dim, out=place)


@dataclass(frozen=True)
class TensorLayout:
    """shard(full tensors, degree, rank, dims) returns one rank's tensor; join(every rank's tensor, dims) returns the
    full tensors in pieces."""

    shard: Callable[[list[Tensor], int, int, Dims], Tensor]
    join: Callable[[list[Tensor], Dims], list[Pieces]]
    split: bool = True  # whether tensor-parallel ranks hold different parts


def _padded(tensor: Tensor, degree: int) -> Tensor:
    missing = -tensor.shape[0] % degree
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _shard_qkv(full: list[Tensor], degree: int, rank: int, dims: Dims) -> Tensor:
    """Shard queries, keys and values. Megatron interleaves them by key-value head: the queries of its group, its key,
    its value. Of more ranks than key-value heads, each has an equal part of one head's rows."""
    q, k, v = (tensor.unflatten(0, (dims.kv_heads, -1)) for tensor in full)
    return torch.cat([q, k, v], 1).flatten(0, 1).chunk(degree)[rank]


def _join_qkv(parts: list[Tensor], dims: Dims) -> list[Pieces]:
    """Join [kv heads of the rank, (queries + 2) * head_dim, ...] of every rank into queries, keys and values."""
    if len(parts) > dims.kv_heads:
        parts = [torch.cat(parts)]
    groups = [group for part in parts for group in part.unflatten(0, (dims.kv_heads // len(parts), -1)).unbind()]
    d = dims.head_dim
    return [
        Pieces([group[range_] for group in groups]) for range_ in (slice(-2 * d), slice(-2 * d, -d), slice(-d, None))
    ]


def _join_gate_up(parts: list[Tensor], _: Dims) -> list[Pieces]:
    """Join gate and up; each rank holds its gate rows above its up rows."""
    halves = [part.chunk(2) for part in parts]
    return [Pieces([gate for gate, _ in halves]), Pieces([up for _, up in halves])]


def _join_vocab(parts: list[Tensor], dims: Dims) -> list[Pieces]:
    """Join the vocabulary without the padding rows that make the shards equal."""
    rows = parts[0].shape[0]
    return [Pieces([part[: dims.vocab - rank * rows] for rank, part in enumerate(parts) if rank * rows < dims.vocab])]


WHOLE = TensorLayout(lambda full, degree, rank, dims: full[0], lambda parts, dims: [Pieces(parts[:1])], split=False)
"""Equal on every rank."""
COLUMN = TensorLayout(lambda full, degree, rank, dims: full[0].chunk(degree)[rank], lambda parts, dims: [Pieces(parts)])
"""Output features are split (dimension 0)."""
ROW = TensorLayout(
    lambda full, degree, rank, dims: full[0].chunk(degree, 1)[rank], lambda parts, dims: [Pieces(parts, 1)]
)
"""Input features are split (dimension 1)."""
VOCAB = TensorLayout(lambda full, degree, rank, dims: _padded(full[0], degree).chunk(degree)[rank], _join_vocab)
"""Rows are split, after padding with zeros to a multiple of the degree."""
QKV = TensorLayout(_shard_qkv, _join_qkv)
"""Queries, keys and values in one matrix (or bias), grouped by key-value head."""
GATE_UP = TensorLayout(
    lambda full, degree, rank, dims: torch.cat([tensor.chunk(degree)[rank] for tensor in full]), _join_gate_up
)
"""The two matrices of a gated MLP, stacked."""
FUSED_GATE_UP = TensorLayout(
    lambda full, degree, rank, dims: GATE_UP.shard(list(full[0].chunk(2)), degree, rank, dims),
    lambda parts, dims: [Pieces([piece for half in _join_gate_up(parts, dims) for piece in half.parts])],
)
"""The same two, stacked in the full tensor too, as transformers stores routed experts."""
FUSED_QKV = TensorLayout(
    lambda full, degree, rank, dims: _shard_qkv(
        list(full[0].split([n * dims.head_dim for n in (dims.heads, dims.kv_heads, dims.kv_heads)])), degree, rank, dims
    ),
    lambda parts, dims: [Pieces([piece for whole in _join_qkv(parts, dims) for piece in whole.parts])],
)
"""Queries, keys and values, one above the other in the full tensor too."""


INTERLEAVED = TensorLayout(
    lambda full, degree, rank, dims: GATE_UP.shard([full[0][::2], full[0][1::2]], degree, rank, dims),
    lambda parts, dims: [Pieces([torch.stack([one.tensor() for one in _join_gate_up(parts, dims)], 1).flatten(0, 1)])],
)
"""The same two in alternating rows, of gate and of up."""


def _transposed(layout: TensorLayout) -> TensorLayout:
    """Return the layout of a full tensor whose matrix is transposed."""
    return TensorLayout(
        lambda full, degree, rank, dims: layout.shard([full[0].t()], degree, rank, dims),
        lambda parts, dims: [Pieces([pieces.tensor().t()]) for pieces in layout.join(parts, dims)],
    )


STACKED_GATE_UP = _transposed(FUSED_GATE_UP)
"""Gate and up of one expert of a stack: [H, 2 * inner]."""
INTERLEAVED_GATE_UP = _transposed(INTERLEAVED)
"""The same in alternating columns, or [2 * inner] for a bias."""
STACKED_DOWN = _transposed(ROW)
"""Input features of an expert of a stack, which holds them as rows: [inner, H]."""

LAYOUTS = {
    Layout.WHOLE: WHOLE,
    Layout.COLUMN: COLUMN,
    Layout.WHOLE_EMBEDDING: VOCAB,
    Layout.EMBEDDING: VOCAB,
    Layout.HEAD: VOCAB,
    Layout.QKV: QKV,
    Layout.QUERY: COLUMN,
    Layout.OUT: ROW,
    Layout.GATE_UP: GATE_UP,
    Layout.DOWN: ROW,
    Layout.FUSED_QKV: FUSED_QKV,
    Layout.FUSED_GATE_UP: FUSED_GATE_UP,
    Layout.STACKED_GATE_UP: STACKED_GATE_UP,
    Layout.INTERLEAVED_GATE_UP: INTERLEAVED_GATE_UP,
    Layout.STACKED_DOWN: STACKED_DOWN,
}
LINEAR = dict.fromkeys((COLUMN, QKV, GATE_UP), COLUMN) | dict.fromkeys((ROW, STACKED_DOWN), WHOLE)
LINEAR |= {STACKED_GATE_UP: FUSED_GATE_UP, INTERLEAVED_GATE_UP: INTERLEAVED}
"""Layouts of linear layers, and those of their adapters' matrices B [out, rank]."""


def stack_experts(matrix: str | None, experts: Sequence[Tensor]) -> Tensor:
    """Return the tensors of all experts of a layer in one: the adapters' matrices A or B as PEFT stores them, and with
    None weights as transformers does."""
    if matrix is None:
        return torch.stack(list(experts))
    return torch.cat(list(experts)) if matrix == "A" else torch.stack(list(experts), -1).flatten(1)


@dataclass(frozen=True)
class NameRule:
    """One Megatron parameter and its HF tensors, as in a WeightRow: of a table, or found by its name."""

    megatron: str
    layout: TensorLayout
    hf: tuple[str, ...]
    matrix: str | None = None
    """A or B for one of two factors of a weight (stack_experts); None for the parameter itself."""
    layer: int | None = None
    expert: int | None = None
    """The numbers in the name that was found."""

    def hf_names(self, *, expert_offset: int = 0) -> tuple[str, ...]:
        """Return the HF names of this parameter, or of the same parameter of the expert `expert_offset` further on."""
        expert = None if self.expert is None else self.expert + expert_offset
        return tuple(name.format(layer=self.layer, expert=expert) for name in self.hf)

    @property
    def routed(self) -> bool:
        """True for a routed expert's weight, which is sharded over the expert-parallel ranks, not over the dense
        layout."""
        return "{expert}" in self.megatron

    @property
    def stacked(self) -> bool:
        """True for a routed expert's weight whose HF tensor holds those of all experts, one after the other."""
        return self.routed and "{expert}" not in self.hf[0]

    @property
    def linear(self) -> bool:
        """True for the weight of a linear layer: of all but the output layer, routers and the projection of multi-token
        prediction."""
        return self.layout in LINEAR and self.megatron.endswith(".weight") and "eh_proj" not in self.megatron
