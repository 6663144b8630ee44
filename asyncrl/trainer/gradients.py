"""Accumulation of a parameter's gradient over one step. Independent of Megatron, which only provides the buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

CHUNK = 1 << 16
"""Elements added at a time. torch makes a float32 copy before it adds bfloat16 to float32; a small copy stays in
cache."""


def gradient_buffer(parameter: Any) -> Tensor | None:
    """Return the float32 buffer [shape of the parameter] that accumulates this step's gradient, zeroed if the step has
    none yet. Returns None outside data parallelism."""
    total: Tensor | None = getattr(parameter, "main_grad", None)
    if total is not None and getattr(parameter, "holds_old_gradient", False):
        parameter.holds_old_gradient = False
        total.zero_()
    return total


def collect(parameter: Any, gradient: Tensor) -> None:
    """Add a gradient to the buffer. The first gradient of a step is copied."""
    total: Tensor = parameter.main_grad
    if parameter.holds_old_gradient:
        parameter.holds_old_gradient = False
        total.copy_(gradient)
    elif gradient.dtype == total.dtype or gradient.device.type != "cpu":
        total.add_(gradient)
    else:
        for into, part in zip(total.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True):
            into.add_(part)
