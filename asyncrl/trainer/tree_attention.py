"""Attention over a pack without an N by N mask: memory grows with the number of rows, work with the pairs that attend.

On CPU it runs block by block (trainer/blocks.py plans the blocks): the kernels return log Z of the scores with the
values, so that parts of one softmax can be computed separately. Backward gives each block the values and log Z of the
whole row and sums the gradients (like ring attention, arXiv 2310.01889). On a GPU, FlexAttention gets the same rule as
a block mask.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.trainer.blocks import AttentionCall, AttentionPlan, plan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _TreeAttention(torch.autograd.Function):
    """Attention on CPU: q [n, h, d], k and v [N, g, d] with g dividing h -> [n, h, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: AttentionPlan, scale: float) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        several = bool(calls.above)
        out = torch.empty(q.shape, dtype=exact if several else q.dtype)
        log_z = torch.empty(q.shape[:2], dtype=exact)
        for call in calls.own:
            part, z = _forward(
                call.take_queries(q),
                call.take_keys(k),
                call.take_keys(v),
                is_causal=call.causal,
                attn_mask=call.mask(q.dtype),
                scale=scale,
            )
            call.put(out, part)
            call.put(log_z, z)
        for call in calls.above:
            part, z = _forward(
                call.take_queries(q), call.take_keys(k), call.take_keys(v), attn_mask=call.mask(q.dtype), scale=scale
            )
            call.merge(out, log_z, part, z)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_z)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_z = ctx.saved_tensors
        grad = grads[0].contiguous()
        exact = torch.promote_types(q.dtype, torch.float32)
        whole = len(q) == len(k)  # then every key is covered by `own` calls, which come first
        sums = [torch.empty(q.shape, dtype=exact)]
        sums += [(torch.empty if whole else torch.zeros)(x.shape, dtype=exact) for x in (k, v)]
        for number, call in enumerate((*ctx.calls.own, *ctx.calls.above)):
            mine, z = call.take_queries(grad), _rows_of(call, log_z)
            if not call.alone:  # padding has no gradient, and probability 0 for every key
                mine = mine.masked_fill(call.spare_queries[:, None, :, None], 0.0)
                z = z.masked_fill(call.spare_queries[:, None], math.inf)
            parts = _backward(
                mine,
                call.take_queries(q),
                call.take_keys(k),
                call.take_keys(v),
                call.take_queries(out),
                z,
                0.0,
                call.causal,
                attn_mask=call.mask(q.dtype),
                scale=ctx.scale,
            )
            first = number < len(ctx.calls.own)
            for total, part, keys in zip(sums, parts, (False, True, True), strict=True):
                (call.put if first else call.add)(total, part, keys=keys)
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None


def _rows_of(call: AttentionCall, log_z: Tensor) -> Tensor:
    """Select the block rows of [N, h] -> [B, h, Q], laid out as the kernel left them."""
    return call.take_queries(log_z[..., None]).squeeze(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float) -> Tensor:
    """Attend with each of this rank's n rows (all N without context parallelism) to the rows that the pack allows: q
    [n, h, d], k [N, g, d], v [N, g, e] -> [n, h, e]."""
    if q.device.type != "cpu":
        return _flex(q, k, v, pack, scale)
    width = v.shape[-1]
    if width != q.shape[-1]:  # latent attention: the kernel supports a single width
        widest = max(width, q.shape[-1])
        q, k, v = (torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if pack not in _PLANS:
        _PLANS[pack] = plan(pack)
    out: Tensor = _TreeAttention.apply(q, k, v, _PLANS[pack], scale)
    return out[..., :width]


_PLANS: WeakKeyDictionary[Pack, AttentionPlan] = WeakKeyDictionary()  # shared by all layers and both passes


# --- on a GPU -----------------------------------------------------------------------------------------------


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
    out: Tensor = _flex_attention()(*batched, block_mask=_MASKS[pack], scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
