"""Where a parameter's gradient of this step is summed up. Apart from Megatron, which only the buffers come from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

CHUNK = 1 << 16
"""Numbers added at a time: adding bfloat16 to float32, torch makes a float32 copy first, which then stays in cache."""


def gradient_buffer(parameter: Any) -> Tensor | None:
    """The buffer [shape of the parameter] float32 that sums up this step's gradient, zero where it has none yet; None
    outside data parallelism."""
    total: Tensor | None = getattr(parameter, "main_grad", None)
    if total is not None and getattr(parameter, "holds_old_gradient", False):
        parameter.holds_old_gradient = False
        total.zero_()
    return total


def collect(parameter: Any, gradient: Tensor) -> None:
    """Add a gradient to the buffer; the first of a step is copied there."""
    total: Tensor = parameter.main_grad
    if parameter.holds_old_gradient:
        parameter.holds_old_gradient = False
        total.copy_(gradient)
    elif gradient.dtype == total.dtype or gradient.device.type != "cpu":
        total.add_(gradient)
    else:
        for into, part in zip(total.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True):
            into.add_(part)
