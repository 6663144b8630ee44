"""Attention over a pack without an N by N mask: memory grows with the number of rows, work with the pairs that attend.

FlexAttention gets the rule of the pack as a block mask. On a CPU, backends/cpu/pack_attention.py applies the same rule.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.backends.cpu import pack_attention

KERNEL_OPTIONS = {"BACKEND": "TRITON"}
"""Options of FlexAttention. By itself, torch 2.13 takes its decoding kernel for fewer than 128 rows, and raises
NoValidChoicesError for many combinations of rows and heads."""


def attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
    """Attend with each of this rank's n rows (all N without context parallelism) to the rows that the pack allows: q
    [n, h, d], k [N, g, d], v [N, g, e] -> [n, h, e]."""
    if q.device.type == "cpu":
        return pack_attention.attend(q, k, v, pack, scale)
    return _flex(q, k, v, pack, scale)


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(pack: Pack) -> Any:
    """Return the rule of `pack.ends` for FlexAttention, which stores it in blocks of 128 rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends, (first, last) = pack.ends, pack.rows

    def attends(_: Tensor, __: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + first) & (row + first < ends[key])

    return create_block_mask(attends, None, None, last - first, len(ends), device=str(ends.device))


_MASKS: WeakKeyDictionary[Pack, Any] = WeakKeyDictionary()


def _flex(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
    if pack not in _MASKS:
        _MASKS[pack] = block_mask(pack)
    batched = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = _flex_attention()(
        *batched,
        block_mask=_MASKS[pack],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=KERNEL_OPTIONS,
    )
    return out[0].transpose(0, 1)
