"""FlexAttention as an opaque operator: what it returns and what it keeps for backward, without its kernels.

tests/cuda_stub/test_kernels.py compiles the real one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cuda_stub.fake import MODE


@torch.library.custom_op("cuda_stub::attention", mutates_args=(), device_types="cuda")
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend: q [1, h, n, d], k [1, g, N, d], v [1, g, N, e] -> [1, h, n, e] laid out like q, and the logarithm of the
    sums [1, h, n] in float32."""
    raise NotImplementedError("only for fake tensors")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, width = q.shape
    assert k.shape[3] == width
    assert heads % k.shape[1] == 0
    assert k.shape[:3] == v.shape[:3]
    assert q.dtype == k.dtype == v.dtype
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


@torch.library.custom_op("cuda_stub::attention_backward", mutates_args=(), device_types="cuda")
def attention_backward(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    raise NotImplementedError("only for fake tensors")


@attention_backward.register_fake
def _(of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert of_out.shape == out.shape
    MODE.ledger.borrow(log_sums.nbytes)  # the kernel's workspace: the sum of out * of_out of each row
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, of_out: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(of_out, *ctx.saved_tensors)


attention.register_autograd(_backward, setup_context=_keep)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool, **_: Any) -> Tensor:
    """Stand in for the compiled torch.nn.attention.flex_attention.flex_attention."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert block_mask.shape[-2:] == (q.shape[2], k.shape[2])
    out: Tensor = attention(q, k, v)[0]
    return out
