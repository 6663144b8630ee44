"""How full HF tensors lie in one rank's Megatron parameter: `shard` cuts, `join` puts together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dims:
    """The numbers of a model that layouts need."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool


def dims_of(hf: dict[str, Any]) -> Dims:
    """From an HF config, with its defaults."""
    heads = hf["num_attention_heads"]
    return Dims(
        heads,
        hf.get("num_key_value_heads") or heads,
        hf.get("head_dim") or hf["hidden_size"] // heads,
        hf["vocab_size"],
        bool(hf.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True)
class Layout:
    """shard(full tensors, degree, rank, dims) -> one rank's tensor; join(every rank's tensor, dims) -> full tensors."""

    shard: Callable[[list[Tensor], int, int, Dims], Tensor]
    join: Callable[[list[Tensor], Dims], list[Tensor]]
    split: bool = True  # whether tensor-parallel ranks hold different parts


def _padded(tensor: Tensor, degree: int) -> Tensor:
    missing = -tensor.shape[0] % degree
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _together(parts: list[Tensor], dim: int = 0) -> Tensor:
    """A single part needs no copy: at degree 1 the stream hands out the parameter's own memory."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _shard_qkv(full: list[Tensor], degree: int, rank: int, dims: Dims) -> Tensor:
    """Megatron interleaves by key-value head: the queries of its group, its key, its value."""
    q, k, v = (tensor.unflatten(0, (dims.kv_heads, -1)) for tensor in full)
    return torch.cat([q, k, v], 1).chunk(degree)[rank].flatten(0, 1)


def _join_qkv(parts: list[Tensor], dims: Dims) -> list[Tensor]:
    """[kv heads of the rank, (queries + 2) * head_dim, ...] of every rank -> queries, keys, values."""
    grouped = [part.unflatten(0, (dims.kv_heads // len(parts), -1)) for part in parts]
    d = dims.head_dim
    ranges = (slice(0, -2 * d), slice(-2 * d, -d), slice(-d, None))
    return [_together([part[:, range_].flatten(0, 1) for part in grouped]) for range_ in ranges]


def _join_gate_up(parts: list[Tensor], _: Dims) -> list[Tensor]:
    """Each rank holds its gate rows above its up rows."""
    halves = [part.chunk(2) for part in parts]
    return [_together([gate for gate, _ in halves]), _together([up for _, up in halves])]


WHOLE = Layout(lambda full, degree, rank, dims: full[0], lambda parts, dims: [parts[0]], split=False)
"""The same on every rank."""
COLUMN = Layout(lambda full, degree, rank, dims: full[0].chunk(degree)[rank], lambda parts, dims: [_together(parts)])
"""Output features split (dimension 0)."""
ROW = Layout(lambda full, degree, rank, dims: full[0].chunk(degree, 1)[rank], lambda parts, dims: [_together(parts, 1)])
"""Input features split (dimension 1)."""
VOCAB = Layout(
    lambda full, degree, rank, dims: _padded(full[0], degree).chunk(degree)[rank],
    lambda parts, dims: [_together(parts)[: dims.vocab]],
)
"""Rows split, after padding with zeros to a multiple of the degree."""
QKV = Layout(_shard_qkv, _join_qkv)
"""Queries, keys and values in one matrix (or bias), by key-value head."""
GATE_UP = Layout(
    lambda full, degree, rank, dims: torch.cat([tensor.chunk(degree)[rank] for tensor in full]), _join_gate_up
)
"""The two matrices of a gated MLP, one above the other."""
