"""Megatron's data parallelism with less work per parameter, which is what counts where a step has few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

CHUNK = 1 << 16
"""Numbers added at a time: adding bfloat16 to float32, torch makes a float32 copy first, which then stays in cache."""


class Replica(DistributedDataParallel):
    """The first gradient of a step is copied into the float32 buffer, where Megatron fills the buffer with zeros and
    adds: one pass over all gradients in place of three. Whoever adds to a buffer himself asks `gradient_buffer`."""

    def zero_grad_buffer(self) -> None:
        """What no gradient has reached when the step's passes are over is set to zero then."""
        for parameter in self.params_with_grad:
            parameter.holds_old_gradient = True
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.reset()

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Sum over replicas."""
        for parameter in self.params_with_grad:
            gradient_buffer(parameter)
        super().finish_grad_sync(*args, **kwargs)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if param.grad is not None:
                _collect(param, param.grad)
                param.grad = None

        return hook


def gradient_buffer(parameter: Any) -> Tensor | None:
    """The buffer [shape of the parameter] float32 that sums up this step's gradient, zero where it has none yet; None
    outside data parallelism."""
    total: Tensor | None = getattr(parameter, "main_grad", None)
    if total is not None and getattr(parameter, "holds_old_gradient", False):
        parameter.holds_old_gradient = False
        total.zero_()
    return total


def _collect(parameter: Any, gradient: Tensor) -> None:
    total: Tensor = parameter.main_grad
    if parameter.holds_old_gradient:
        parameter.holds_old_gradient = False
        total.copy_(gradient)
    elif gradient.dtype == total.dtype or gradient.device.type != "cpu":
        total.add_(gradient)
    else:
        for into, part in zip(total.view(-1).split(CHUNK), gradient.reshape(-1).split(CHUNK), strict=True):
            into.add_(part)
