"""Megatron's data parallelism with less work per parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

VOCABULARY = ("word_embeddings", "output_layer")


class Replica(DistributedDataParallel):
    """The first gradient of a step is copied into the float32 buffer, where Megatron fills the buffer with zeros and
    adds. Three passes over all gradients become one, which counts where a step has few tokens.

    What multiplies hidden states into logits is filled as ever: who computes its gradient may add to the buffer itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._filled = [p for name, p in self.module.named_parameters() if name.rsplit(".", 2)[-2] in VOCABULARY]
        self._fresh: set[torch.nn.Parameter] = set()  # what no gradient has reached in this step

    def zero_grad_buffer(self) -> None:
        """What no gradient has reached when the step's passes are over is set to zero then."""
        self._fresh = set(self.params_with_grad).difference(self._filled)
        for parameter in self._filled:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.reset()

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Sum over replicas."""
        for parameter in self._fresh:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        self._fresh.clear()
        super().finish_grad_sync(*args, **kwargs)

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if param.grad is None:
                return
            total: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
            if param in self._fresh:
                self._fresh.discard(param)
                total.copy_(param.grad)
            else:
                total.add_(param.grad)
            param.grad = None

        return hook
