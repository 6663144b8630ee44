"""Megatron's data parallelism with less work per parameter, which dominates when a step has few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from asyncrl.trainer.gradients import collect, gradient_buffer


class FastDDP(DistributedDataParallel):
    """DistributedDataParallel that copies the first gradient of a step into the float32 buffer. Megatron fills the
    buffer with zeros and adds: three passes over all gradients instead of one. Code that adds to a buffer itself must
    call `gradient_buffer`."""

    def zero_grad_buffer(self) -> None:
        """Mark the buffers as stale. Those that get no gradient during the step are zeroed after its passes."""
        for parameter in self.params_with_grad:
            parameter.holds_old_gradient = True
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.reset()

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Zero the buffers without a gradient, then reduce the gradients over replicas."""
        for parameter in self.params_with_grad:
            gradient_buffer(parameter)
        super().finish_grad_sync(*args, **kwargs)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if param.grad is not None:
                collect(param, param.grad)
                param.grad = None

        return hook
