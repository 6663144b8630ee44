"""Experts of an engine on a CPU that are divided among ranks (sglang_shim.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.extensions.cpu.sglang_shim import _skip_experts_of_others


class Chosen(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor


def native(layer: Any, x: Tensor, chosen: Chosen, config: None) -> Tensor:
    """Sum up as SGLang's loop does, which knows no expert -1, and counts an expert of a token once."""
    found = torch.zeros_like(x)
    for token, ids in enumerate(chosen.topk_ids.tolist()):
        assert len(set(ids)) == len(ids)
        for expert, weight in zip(ids, chosen.topk_weights[token], strict=True):
            assert expert >= 0
            found[token] += weight * (x[token] @ layer.experts[expert])
    return found


def test_ranks_together_give_what_one_with_all_experts_gives() -> None:
    module = SimpleNamespace(moe_forward_native=native)
    _skip_experts_of_others(module)
    draw = torch.Generator().manual_seed(0)
    experts, x = torch.randn(6, 4, 4, generator=draw), torch.randn(9, 4, generator=draw)
    ids = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(9)])
    ids[0] = torch.tensor([0, 1, 2])  # the second rank has none of this token's experts
    weights = torch.rand(9, 3, generator=draw)
    whole = native(SimpleNamespace(experts=experts), x, Chosen(weights, ids), None)
    summed = torch.zeros_like(x)
    for rank in range(2):
        layer = SimpleNamespace(experts=experts[3 * rank : 3 * rank + 3], moe_ep_size=2)
        local = torch.where(ids // 3 == rank, ids % 3, -1)
        summed += module.moe_forward_native(layer, x, Chosen(weights, local), None)
    torch.testing.assert_close(summed, whole)
    alone = SimpleNamespace(experts=experts, moe_ep_size=1)
    assert torch.equal(module.moe_forward_native(alone, x, Chosen(weights, ids), None), whole)
