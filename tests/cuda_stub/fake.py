"""Tensors on cuda:0 that have a shape and a type but no values, and what a step does to them.

Everything on the CPU stays real: the batch, the table of tokens, what is loaded from files. A call that names cuda, or
that gets a tensor from there, runs under torch's FakeTensorMode, which rejects mixed devices and shapes. What comes
back to the CPU is real again: the values that the harness knows (`tell`), otherwise ones.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
TO_HOST = (aten._to_copy.default, aten.copy_.default, aten._copy_from.default)
OF_DATA = (aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default)
"""Operations whose result the host cannot know without waiting for the device."""


FACTORS = {
    aten.mm: slice(0, 2),
    aten.bmm: slice(0, 2),
    aten.addmm: slice(1, 3),
    aten.addmm_: slice(1, 3),
    aten.baddbmm: slice(1, 3),
}
"""Which arguments of a product are its factors. torch's shape rules let their number formats differ; kernels do not."""


class Ledger:
    """The bytes alive on the device, and where the host waited for a value."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0
        self.waits: Counter[str] = Counter()

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage._cdata)

    def borrow(self, nbytes: int) -> None:
        """Count bytes that an operation needs until it ends."""
        self.peak = max(self.peak, self.live + nbytes)

    def _free(self, storage: int) -> None:
        self.live -= self._sizes.pop(storage)

    def restart(self) -> None:
        """Start to count waits, and the peak, anew."""
        gc.collect()
        self.waits.clear()
        self.peak = self.live

    def wait(self, what: str) -> None:
        """Note that the host waits, with the innermost caller outside torch."""
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename or "/cuda_stub/" in frame.f_code.co_filename:
            assert frame.f_back is not None
            frame = frame.f_back
        file = frame.f_code.co_filename.partition("site-packages/")
        self.waits[f"{what} in {(file[2] or file[0]).rpartition('/asyncrl/')[2]}:{frame.f_code.co_name}"] += 1


class DeviceMode(FakeTensorMode):
    """torch's mode, with a ledger."""

    avoid_device_init = property(lambda _: True, lambda *_: None)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.cache_enabled = True
        self.ledger = Ledger()
        self._depth = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note what it does to the device."""
        if (factors := FACTORS.get(getattr(func, "overloadpacket", None))) is not None:
            assert len({x.dtype for x in args[factors]}) == 1, (func, [x.dtype for x in args])
        self._depth += 1
        try:
            out = super().dispatch(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if func in OF_DATA and _is_there(args[0]):
            self.ledger.wait(func._schema.name.partition("::")[2])
        if self._depth:  # a shape rule that is written as several operations, where the device has one kernel
            return out
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                self.ledger.hold(tensor)
        return out


MODE = DeviceMode()
SELECTED: list[int] = []
"""Number of elements that a mask selects, innermost last, while the harness knows it."""


def tell(tensor: Tensor, values: Tensor) -> Tensor:
    """Give a fake tensor values, which it has after a copy to the CPU."""
    assert tensor.shape == values.shape, (tensor.shape, values.shape)
    tensor.known = values  # type: ignore[attr-defined]
    return tensor


def _scalar(_: Any, __: Any, tensor: Tensor) -> Any:
    known = getattr(tensor, "known", None)
    if known is not None:
        return known.item()
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _masked_select(mode: FakeTensorMode, _: Any, tensor: Tensor, mask: Tensor) -> Tensor:
    assert SELECTED, "a mask of unknown length: let the harness tell it"
    return tensor.new_empty(SELECTED[-1])


fake_impls.op_implementations_dict[aten._local_scalar_dense.default] = _scalar
fake_impls.op_implementations_dict[aten.masked_select.default] = _masked_select


def _is_there(x: Any) -> bool:
    if isinstance(x, FakeTensor):
        return True
    return isinstance(x, torch.device | str) and str(x).startswith("cuda")


def _returned(x: Any, source: Any) -> Any:
    """Make what came to the CPU real."""
    if not isinstance(x, FakeTensor) or x.device.type != "cpu":
        return x
    if _is_there(source) and source.device.type == "cuda":
        MODE.ledger.wait("copy to the CPU")
    known = getattr(source, "known", None)
    return known.clone().to(x.dtype) if known is not None else torch.ones(x.shape, dtype=x.dtype)


class OnDevice(TorchFunctionMode):
    """Run calls that name cuda, or that get a tensor from there, under FakeTensorMode; leave all others real."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if not any(map(_is_there, pytree.tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        if (name := getattr(function, "__name__", "")) in HOST:
            return HOST[name](args[0])
        with MODE:
            out = function(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if type(out) in (tuple, list):
            return type(out)(_returned(x, source) for x in out)
        return _returned(out, source)


def _tolist(tensor: Tensor) -> Any:
    MODE.ledger.wait("tolist")
    known = getattr(tensor, "known", None)
    return (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).tolist()


def _value(kind: Callable[[Any], Any] | None = None) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        MODE.ledger.wait("item")
        found = _scalar(None, None, tensor)
        return kind(found) if kind else found

    return read


HOST: dict[str, Callable[[Tensor], Any]] = {
    "item": _value(),
    "__int__": _value(int),
    "__index__": _value(int),
    "__float__": _value(float),
    "__bool__": _value(bool),
    "pin_memory": lambda tensor: tensor,
    "record_stream": lambda tensor: None,
}
"""What Python code does on the host with one tensor of the device."""


def install() -> None:
    """Let torch's autograd and modules work with such tensors."""
    real_backward = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with MODE:
            real_backward(*args, **kwargs)

    torch.autograd.backward = backward  # type: ignore[assignment]
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign, assignment]


def _apply(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """torch.nn.Module._apply for parameters that become fake. Megatron's marks on them stay."""
    for child in module.children():
        child._apply(function)
    for name, old in module._parameters.items():
        if old is None:
            continue
        with torch.no_grad():
            moved = function(old)
        if moved is not old:
            new = torch.nn.Parameter(moved.detach(), old.requires_grad)
            new.__dict__.update({k: v for k, v in vars(old).items() if k not in vars(new) and k[0] != "_"})
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
