"""Megatron's gated MLP, without the extra memory passes that fusions of TransformerEngine and Apex would save."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class GatedMLP(MLP):
    """Megatron's MLP weights with another forward, for a dense layer or one routed expert, which may have biases.

    megatron-core 0.16.1 adds the second bias in place to a view, which autograd refuses.
    """

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Any]:
        """Compute [..., H] -> [..., H], scaled by the router's weight of each token if one is given."""
        inner, bias = self.linear_fc1(hidden_states)
        inner = self._activated(inner if bias is None else inner + bias)
        scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
        if scale is not None:
            inner = (inner * scale).to(inner.dtype)
        out, bias = self.linear_fc2(inner)
        if bias is not None:
            out = out + (bias if scale is None else bias * scale).to(out.dtype)
        return out, None

    def _activated(self, both: Tensor) -> Tensor:
        """Compute [..., gate and up] -> [..., inner]. A limit holds from above for the gate, on both sides for up."""
        config, limit = self.config, self.config.activation_func_clamp_value
        if config.activation_func is F.silu and limit is None:
            return swiglu(both)
        gate, up = both.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + config.glu_linear_offset
        found: Tensor = config.activation_func(gate) * up
        return found


CACHED_ROWS = 128
"""Tokens whose gradients a CPU computes at a time, because their numbers then stay in its cache."""


def swiglu(both: Tensor) -> Tensor:
    """Compute silu(gate) * up for [..., gate and up]. Only the input is kept for backward, which writes both gradients
    in place (autograd would concatenate them in another pass)."""
    found: Tensor = _SwiGLU.apply(both)
    return found


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        ctx.save_for_backward(both)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        found, rows = torch.empty_like(both), len(both) if both.is_cuda else CACHED_ROWS
        for given, read, written in zip(*(one.split(rows) for one in (grads[0], both, found)), strict=True):
            (gate, up), (of_gate, of_up) = read.chunk(2, -1), written.chunk(2, -1)
            torch.ops.aten.silu.out(gate, out=of_up).mul_(given)
            torch.mul(given, up, out=of_gate)
            torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return found
