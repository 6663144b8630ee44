"""Megatron's data parallelism, and how gradients accumulate under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from asyncrl.config import TrainerConfig
from asyncrl.trainer.gradients import collect, gradient_buffer
from asyncrl.trainer.layers import accumulates_by_itself


class FastDDP(DistributedDataParallel):
    """DistributedDataParallel that copies the first gradient of a step into the float32 buffer. Megatron fills the
    buffer with zeros and adds: three passes over all gradients instead of one. Code that adds to a buffer itself must
    call `gradient_buffer`. TransformerEngine's layers do not, so the buffers are filled with zeros for them."""

    reduces = True
    """Whether backward starts the reduction of the gradients, with overlap_grad_reduce. Of several passes that
    accumulate one gradient, only the last may."""

    def zero_grad_buffer(self) -> None:
        """Mark the buffers as stale. Those that get no gradient during the step are zeroed after its passes."""
        fused = accumulates_by_itself(self.module)
        for parameter in self.params_with_grad:
            parameter.holds_old_gradient = not fused
        if fused:
            super().zero_grad_buffer()
            return
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
                if not getattr(param, "grad_added_to_main_grad", False):
                    collect(param, param.grad)
                param.grad = None
            # without param.grad too: the head has added it itself
            if self.ddp_config.overlap_grad_reduce and self.reduces:
                self.param_to_bucket_group[param].register_grad_ready(param)

        return hook


def in_data_parallel(
    modules: Sequence[torch.nn.Module], config: TransformerConfig, trainer: TrainerConfig, *, sharded: bool
) -> list[FastDDP]:
    """Wrap the chunks of a model. With `sharded`, each replica holds a part of the optimizer's states."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
        overlap_param_gather=trainer.overlap_param_gather,
        bucket_size=trainer.grad_bucket_size,
    )
    for module in modules:
        _mark_experts(module)
    wrapped = [FastDDP(config, settings, one, disable_bucketing=number > 0) for number, one in enumerate(modules)]
    if trainer.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return wrapped


def _mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the routed experts, so that their gradients are summed over their own replicas. Megatron 0.16 marks them
    only under expert parallelism. If expert_tensor_parallel differs from tensor_parallel, it would sum shards that
    differ, or miss tokens."""
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
