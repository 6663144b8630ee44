"""Which Megatron parameter is which HF tensor, as data, in both directions.

A rule names a parameter on both sides and how it is laid out; a layout says how full HF tensors become one rank's shard
(`shard`) and how the shards of all ranks become full HF tensors (`join`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Layout:
    """shard(full tensors, degree, rank, dims) -> one rank's tensor; join(every rank's tensor, dims) -> full tensors."""

    shard: Callable[[list[Tensor], int, int, Dims], Tensor]
    join: Callable[[list[Tensor], Dims], list[Tensor]]
    split: bool = True  # whether tensor-parallel ranks hold different parts


def _padded(tensor: Tensor, degree: int) -> Tensor:
    missing = -tensor.shape[0] % degree
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _shard_qkv(full: list[Tensor], degree: int, rank: int, dims: Dims) -> Tensor:
    """Megatron interleaves by key-value head: the queries of its group, its key, its value."""
    q, k, v = (tensor.unflatten(0, (dims.kv_heads, -1)) for tensor in full)
    return torch.cat([q, k, v], 1).chunk(degree)[rank].flatten(0, 1)


def _join_qkv(parts: list[Tensor], dims: Dims) -> list[Tensor]:
    grouped = torch.cat(parts).unflatten(0, (dims.kv_heads, -1))  # [kv heads, (queries + 2) * head_dim, ...]
    d = dims.head_dim
    return [part.flatten(0, 1) for part in (grouped[:, : -2 * d], grouped[:, -2 * d : -d], grouped[:, -d:])]


def _join_gate_up(parts: list[Tensor], _: Dims) -> list[Tensor]:
    halves = [part.chunk(2) for part in parts]
    return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


REPLICATED = Layout(lambda full, degree, rank, dims: full[0], lambda parts, dims: [parts[0]], split=False)
ROW = Layout(lambda full, degree, rank, dims: full[0].chunk(degree, 1)[rank], lambda parts, dims: [torch.cat(parts, 1)])
VOCAB = Layout(
    lambda full, degree, rank, dims: _padded(full[0], degree).chunk(degree)[rank],
    lambda parts, dims: [torch.cat(parts)[: dims.vocab]],
)
QKV = Layout(_shard_qkv, _join_qkv)
GATE_UP = Layout(
    lambda full, degree, rank, dims: torch.cat([tensor.chunk(degree)[rank] for tensor in full]), _join_gate_up
)


@dataclass(frozen=True)
class Rule:
    """`{}` is the layer's number in the whole model."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


LLAMA = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCAB),
    Rule("decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",), REPLICATED),
    Rule(
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv"),
        QKV,
    ),
    Rule(
        "decoder.layers.{}.self_attention.linear_proj.weight",
        ("model.layers.{}.self_attn.o_proj.weight",),
        ROW,
    ),
    Rule(
        "decoder.layers.{}.pre_mlp_layernorm.weight",
        ("model.layers.{}.post_attention_layernorm.weight",),
        REPLICATED,
    ),
    Rule(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
        GATE_UP,
    ),
    Rule("decoder.layers.{}.mlp.linear_fc2.weight", ("model.layers.{}.mlp.down_proj.weight",), ROW),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED),
    Rule("output_layer.weight", ("lm_head.weight",), VOCAB),
)
QWEN3 = (
    *LLAMA,
    Rule(
        "decoder.layers.{}.self_attention.q_layernorm.weight",
        ("model.layers.{}.self_attn.q_norm.weight",),
        REPLICATED,
    ),
    Rule(
        "decoder.layers.{}.self_attention.k_layernorm.weight",
        ("model.layers.{}.self_attn.k_norm.weight",),
        REPLICATED,
    ),
)
FAMILIES = {"LlamaForCausalLM": LLAMA, "Qwen3ForCausalLM": QWEN3}


class Mapping:
    """The rules of one architecture, looked up by Megatron name."""

    def __init__(self, architecture: str) -> None:
        self._rules = {rule.megatron: rule for rule in FAMILIES[architecture]}

    def find(self, megatron_name: str) -> tuple[tuple[str, ...], Layout]:
        """HF names and layout of a parameter, whose layer number is the global one. Raises KeyError naming it."""
        number = re.search(r"\.layers\.(\d+)\.", megatron_name)
        general = megatron_name if number is None else megatron_name.replace(number[0], ".layers.{}.", 1)
        if general not in self._rules:
            raise KeyError(f"no rule for the Megatron parameter {megatron_name}")
        rule = self._rules[general]
        return tuple(name.format(number[1]) if number else name for name in rule.hf), rule.layout
