"""Megatron's data parallelism with less work per parameter, which is what counts where a step has few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from asyncrl.trainer.gradients import collect, gradient_buffer


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
                collect(param, param.grad)
                param.grad = None

        return hook
