"""Recomputation of activations by Megatron, for passes over packs.

Megatron runs a part of the model without keeping activations, and runs it again in backward. Its `checkpoint` saves the
arguments with autograd, which accepts only tensors, while a pack is passed as the attention mask. And what a
micro-batch sets on modules before its pass (positions, replayed experts) belongs to a later micro-batch by the time of
backward, because pipeline stages run several forward passes first. `checkpoint` below therefore keeps the pack beside
the tensors, and sets the modules again before it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

from asyncrl.config import TrainerConfig

_megatron_checkpoint = tensor_parallel.checkpoint
_set: Callable[[], None] | None = None


@contextmanager
def micro_batch(prepare: Callable[[], None]) -> Iterator[None]:
    """Prepare the modules for the micro-batch whose forward pass runs inside the block, and again before each part of
    that pass that is recomputed."""
    global _set
    _set = prepare
    prepare()
    try:
        yield
    finally:
        _set = None


def _prepared(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which sets the modules again for the present micro-batch when it is recomputed."""
    prepare = _set

    def run(*args: Any, **kwargs: Any) -> Any:
        if prepare and torch.is_grad_enabled():  # recomputing
            prepare()
        return function(*args, **kwargs)

    return run


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Run Megatron's checkpoint for a function of tensors and other objects."""
    prepared = _prepared(function)
    others = {place: arg for place, arg in enumerate(args) if not (arg is None or torch.is_tensor(arg))}

    def run(*tensors: Any) -> Any:
        return prepared(*(others.get(place, tensor) for place, tensor in enumerate(tensors)))

    tensors = (None if place in others else arg for place, arg in enumerate(args))
    return _megatron_checkpoint(run, distribute_saved_activations, *tensors)


tensor_parallel.checkpoint = checkpoint
if megatron_random.HAVE_TE:  # under FP8, Megatron calls TransformerEngine's checkpoint, which accepts other objects
    from transformer_engine.pytorch import distributed as engine

    _engine_checkpoint = engine.checkpoint
    engine.checkpoint = lambda function, *args, **kwargs: _engine_checkpoint(_prepared(function), *args, **kwargs)
else:  # the default in 0.16.1, fp8=False, counts as fp8, which asks for TransformerEngine
    megatron_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def arguments(trainer: TrainerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's configuration that determine what is recomputed."""
    recompute = trainer.recompute
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }
