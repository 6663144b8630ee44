"""Floating-point operations of a model: the cost of a token, by which micro-batches are balanced, and what a pass
takes, for the metrics of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algo.balance import TOKEN, Costs
from asyncrl.algo.pack import Pack
from asyncrl.models.architectures import megatron_arguments
from asyncrl.weights.layouts import dims_of


@dataclass(frozen=True)
class PassOperations:
    """Floating-point operations of a forward and backward pass of the whole model; forward takes a third."""

    token: float
    """The products of a token with all layer weights."""
    pair: float
    """A token that attends to one other, in layers without windows."""
    row: float
    """A predicted token: the products with the vocabulary."""
    near: float
    """A token that attends to one other, in layers where it attends to the last `window` alone."""
    window: int

    def of(self, pack: Pack, *, gradient: bool = True, frozen: bool = False) -> Tensor:
        """Return the operations of a pass over a pack, as a tensor on its device. A frozen base needs the gradients of
        activations, not of weights; its adapters are not counted."""
        pairs = (pack.ends - torch.arange(pack.num_tokens, device=pack.ends.device)).sum().double()
        attention = self.pair * pairs + self.near * (pack.positions + 1).clamp(max=self.window).sum()
        products = self.token * pack.num_tokens + self.row * len(pack.table_rows)
        if not gradient:
            return (products + attention) / 3
        return products * (2 / 3 if frozen else 1) + attention


def operations_of(hf: dict[str, Any]) -> PassOperations:
    """Compute the operations from a model folder's config.json.

    A product with a weight takes 2 FLOPs forward and 4 backward. A pair of tokens takes 2 FLOPs forward for each
    element of a query and of a value, and two and a half times that backward, where the scores are recomputed (Dao,
    arXiv 2307.08691, section 4.1). Sharding divides all of it equally.
    """
    family, hidden, layers = megatron_arguments(hf), hf["hidden_size"], hf["num_hidden_layers"]
    sparse = sum(family.get("moe_layer_freq", ()))
    local = sum(family.get("window_attn_skip_freq", ()))  # layers with windows
    attention, head = _attention_weights(hf)
    inner = (layers - sparse) * hf["intermediate_size"]
    if sparse:  # of the experts that a token is routed to, and of those that all share
        shared = family.get("moe_shared_expert_intermediate_size") or 0
        inner += sparse * (family["moe_router_topk"] * family["moe_ffn_hidden_size"] + shared)
    pair = 7 * head * hf["num_attention_heads"]  # 2 x 3.5
    weights = layers * attention + 3 * hidden * inner
    window = family["window_size"][0] + 1 if local else 0
    return PassOperations(6 * weights, pair * (layers - local), 6 * hidden * hf["vocab_size"], pair * local, window)


def costs_of(hf: dict[str, Any]) -> Costs:
    """Return the costs in units of one token's products with all layer weights, and with whole windows."""
    whole = operations_of(hf)
    token = whole.token + whole.near * whole.window
    return Costs(pair=round(TOKEN * whole.pair / token), row=round(TOKEN * whole.row / token))


def _attention_weights(hf: dict[str, Any]) -> tuple[int, int]:
    """Return the number of weights of one layer's attention, and the summed width of a head's query and value."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    if "kv_lora_rank" in hf:  # latent attention
        latent, rotated = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
        query, value = hf["qk_nope_head_dim"] + rotated, hf["v_head_dim"]
        down = hf["q_lora_rank"]
        queries = (hidden + heads * query) * down if down else hidden * heads * query
        keys = hidden * (latent + rotated) + latent * heads * (hf["qk_nope_head_dim"] + value)
        return queries + keys + heads * value * hidden, query + value
    dims = dims_of(hf)
    return 2 * hidden * dims.head_dim * (heads + dims.kv_heads), 2 * dims.head_dim
