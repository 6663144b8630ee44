"""An import shim that runs megatron-core's own code on a machine without CUDA (gloo and CPU tensors).

Nothing of Megatron is re-implemented: parallel state, parallel linears, schedules, point-to-point, gradient buffers and
optimizers run unchanged. They name their device "cuda"; inside the megatron.core modules, and only there, this module
makes that name mean CPU. torch itself is unchanged, except for Tensor.cuda(), which could only raise here.

`enable` must run before the first import of megatron.core, in every process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.extensions.cpu import compiler
from asyncrl.import_hooks import hidden

CPU = torch.device("cpu")


def enable() -> bool:
    """Install the shim unless CUDA is available. Returns whether it is active."""
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return True
    assert "megatron.core" not in sys.modules, (
        "megatron_shim.enable() must run before the first import of megatron.core"
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed.*")
    _hide_transformer_engine()
    compiler.postpone()
    sys.meta_path.insert(0, _MegatronFinder(_torch_for_megatron()))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    return True


def _hide_transformer_engine() -> None:
    """Make every import of TransformerEngine raise ImportError."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


class _View(types.ModuleType):
    """A module with a few names replaced."""

    def __init__(self, base: types.ModuleType, **names: Any) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(_base=base, **names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


class _Stream:
    """The only stream: work on the CPU is done when the call returns, so there is nothing to wait for."""

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, _: Any = None) -> _Stream:
        return self


def _torch_for_megatron() -> _View:
    stream = _Stream()
    cuda = _View(
        torch.cuda,
        current_device=lambda *_: CPU,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        get_rng_state=lambda _=None: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
        Stream=lambda *_, **__: stream,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=lambda _: contextlib.nullcontext(),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in ("tensor", "zeros", "ones", "empty", "empty_like")}
    return _View(torch, cuda=cuda, **factories)


def _on_cpu(factory: Callable) -> Callable:
    """Wrap a tensor factory so that "cuda" means CPU. (torch's own must stay: `with torch.device("meta")` needs it.)"""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # pinning needs an accelerator
        return factory(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Make Tensor.type() return the names that Megatron's optimizers compare with: 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _with_type_names(owner: Any, name: str) -> None:
    setattr(owner, name, _cuda_type_names()(getattr(owner, name)))


def _after_random(module: types.ModuleType) -> None:
    logging.getLogger(module.__name__).setLevel(
        logging.ERROR
    )  # its fork() warns that the CPU state changes, which is intended here
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _after_moe_utils(module: types.ModuleType) -> None:
    move = module.maybe_move_tensor_to_cpu  # type: ignore[attr-defined]

    def as_sequence(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Convert split sizes to numpy, because all_to_all_single takes no tensor. Megatron does so only when it copies
        them off a GPU."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor)

    module.maybe_move_tensor_to_cpu = as_sequence  # type: ignore[attr-defined]


def _after_mappings(module: types.ModuleType) -> None:
    """Support routed experts sharded over ranks: they gather and reduce unequal numbers of tokens, which NCCL can do
    and gloo cannot."""

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        missing = max(map(len, parts)) - len(mine)
        sent = torch.cat([mine, mine.new_zeros(missing, *mine.shape[1:])])
        received = [torch.empty_like(sent) for _ in parts]
        dist.all_gather(received, sent, group=group)
        for part, padded in zip(parts, received, strict=True):
            part.copy_(padded[: len(part)])

    def reduce_scatter(mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        mine.copy_(total.split([len(part) for part in parts])[group.rank()])

    unequal = _View(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)
    module.torch = _View(module.torch, distributed=unequal)  # type: ignore[attr-defined, arg-type]


_AFTER: dict[str, Callable[[types.ModuleType], None]] = {  # what a module needs besides its view of torch
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),
    "megatron.core.tensor_parallel.mappings": _after_mappings,
    "megatron.core.tensor_parallel.random": _after_random,
    "megatron.core.transformer.moe.moe_utils": _after_moe_utils,
    "megatron.core.optimizer.clip_grads": lambda module: _with_type_names(module, "clip_grad_by_total_norm_fp32"),
    "megatron.core.optimizer.optimizer": lambda module: _with_type_names(
        module.Float16OptimizerWithFloat16Params, "__init__"
    ),
    "megatron.core.optimizer.distrib_optimizer": lambda module: _with_type_names(
        module.DistributedOptimizer, "__init__"
    ),
}


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Import hook that sets the view as the `torch` of every megatron.core module."""

    def __init__(self, view: _View) -> None:
        self._view = view

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with hidden("wandb"):  # Megatron's inference engine imports it, which takes 0.3 CPU seconds
                run(module)
            if module.__dict__.get("torch") is torch:
                module.torch = self._view  # type: ignore[attr-defined]
            if name in _AFTER:
                _AFTER[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
