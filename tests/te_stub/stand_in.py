"""A stand-in for TransformerEngine's compiled extension, so that its Python modules run on a CPU.

TransformerEngine's own Python code runs unchanged, and so does Megatron's code that uses it. Of some 170 names of the
extension `transformer_engine_torch`, those that linear, norm, grouped-linear and rotary modules call are written here
in torch (those of FP8 in fp8.py); every other raises NotImplementedError. The kernels themselves and their speed are
therefore not tested.

`install` must run after megatron_shim.enable(), which bars TransformerEngine, and before megatron.core is imported.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from asyncrl.extensions.cpu.megatron_shim import CPU, _torch_for_megatron, _View
from tests.te_stub import fp8

CALLS: Counter[str] = Counter()
"""Number of calls of each function of the extension."""
FUNCTIONS: dict[str, Callable] = {made.__name__: made for made in fp8.FUNCTIONS}
DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat4E2M1": torch.uint8,
}
DType = enum.IntEnum("DType", {name: number for number, name in enumerate(DTYPES)})  # type: ignore[misc]


def install() -> None:
    """Make `import transformer_engine` work in this process."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # keeps it from loading CUDA's libraries
    version, installed = metadata.version, metadata.version("transformer_engine")
    metadata.version = lambda name: (
        installed if name.replace("_", "-").startswith("transformer-engine") else version(name)
    )
    assert sys.modules.pop("transformer_engine") is None, "megatron_shim.enable() must run first"
    sys.modules["transformer_engine_torch"] = _extension()
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine.pytorch")
    view = _torch_for_engine()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and module.__dict__.get("torch") is torch:
            module.torch = view  # type: ignore[attr-defined]
    distributed: Any = sys.modules["transformer_engine.pytorch.distributed"]
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment]
    # Megatron then takes torch's AdamW for both layer specs, as it does without TransformerEngine.
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]


def _is_cuda(tensor: Tensor) -> bool:
    """Return true for TransformerEngine's own modules, which refuse other tensors."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith("transformer_engine.")


def _torch_for_engine() -> _View:
    """Return torch as TransformerEngine's modules see it: "cuda" means CPU, and there is a Hopper device."""
    view = _torch_for_megatron()
    view.cuda = _View(
        view.cuda,
        is_available=lambda: True,
        device=lambda *_: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        current_device=lambda: CPU,
    )
    return view


# --- functions: matrices are row-major in torch and column-major in the extension -----------------------------------


def function(made: Callable) -> Callable:
    """Add a function to the extension."""
    FUNCTIONS[made.__name__] = made
    return made


def _product(a: Any, transposed_a: bool, b: Any, transposed_b: bool) -> Tensor:
    """Multiply with float32 accumulation, whatever the precision of the factors."""
    (right, in_fp8), (left, _) = fp8.plain(a), fp8.plain(b)
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    left, right = left.t() if transposed_b else left, right.t() if transposed_a else right
    assert not in_fp8 or left.shape[1] % fp8.ALIGNMENT == 0, f"cuBLAS cannot sum {left.shape[1]} products in FP8"
    return left @ right


@function
def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *more: Any,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Any, None]:
    """Compute op(b) @ op(a), which is added to `out` or replaces it if there is one."""
    accumulate = more[2]
    found = _product(a, transa, b, transb)
    if not transb:
        found = found.reshape(*b.shape[:-1], found.shape[-1])
    if bias is not None and not grad:
        found = found + bias
    if out is not None:
        found = out.add_(found) if accumulate else out.copy_(found)
    else:
        found = found.to(a.dtype if out_dtype is None else DTYPES[DType(out_dtype).name])
        found = found if quantizer is None else fp8.quantize(found, quantizer)
    of_bias = b.reshape(-1, b.shape[-1]).float().sum(0).to(b.dtype) if grad and bias is not None else None
    return found, of_bias, gelu_in, None


@function
def te_general_grouped_gemm(
    a: list[Tensor],
    transa: bool,
    b: list[Tensor],
    transb: bool,
    out: list[Tensor],
    dtype: Any,
    splits: Any,
    bias: list[Tensor],
    bias_type: Any,
    single: bool,
    gelu: Any,
    grad: bool,
    *more: Any,
    **_: Any,
) -> list[Tensor]:
    """Compute one product for each expert. With `single` the results are the rows of one tensor."""
    accumulate, first = more[2], 0
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        found = _product(one, transa, other, transb)
        place = out[0][first : first + len(found)] if single else out[number]
        if bias[number].numel() and not grad:
            found = found + bias[number]
        if accumulate:
            place.add_(found)
        else:
            place.copy_(found)
        first += len(found)
    return bias


@function
def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """Normalize the rows of x. Returns the result and the reciprocal root mean squares."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1) + eps)
    normed = (x.float() * scale[..., None] * (weight.float() + zero_centered)).to(x.dtype)
    if quantizer is not None:
        return fp8.quantize(normed, quantizer, out), None, scale
    return normed if out is None else out.copy_(normed), None, scale


@function
def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    normed, wanted = x.float() * scale[..., None], grad.float() * (weight.float() + zero_centered)
    dx = scale[..., None] * (wanted - normed * (wanted * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


@function
def fused_rope_forward(x: Tensor, angles: Tensor, starts: None, layout: Any, pairs: bool, *_: Any) -> Tensor:
    """Rotate x [N, batch, heads, d] by angles [N, 1, 1, rotated]. Features beyond `rotated` stay as they are. With
    `pairs` (interleaved) neighbours turn together, otherwise those that are half of `rotated` apart."""
    return _rotated(x, angles, 1.0, pairs)


@function
def fused_rope_backward(grad: Tensor, angles: Tensor, starts: None, layout: Any, pairs: bool, *_: Any) -> Tensor:
    """Rotate the gradient back."""
    return _rotated(grad, angles, -1.0, pairs)


def _rotated(x: Tensor, angles: Tensor, sign: float, pairs: bool) -> Tensor:
    turned, rest = x.float().split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], -1)
    if pairs:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        other = torch.cat([-high, low], -1)
    found = turned * angles.cos() + sign * other * angles.sin()
    return torch.cat([found, rest], -1).to(x.dtype)


@function
def multi_tensor_adam(
    chunk: int,
    noop: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    decay: float,
) -> None:
    """Take one step of AdamW for each gradient, parameter, first and second moment. Moments in bfloat16 are rounded
    after the step, which computes in float32."""
    assert decoupled
    first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    for gradient, parameter, kept_mean, kept_square in zip(*tensors, strict=True):
        mean = kept_mean.float().lerp_(gradient.float(), 1 - beta1)
        square = kept_square.float().mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        update = (mean / first) / ((square / second).sqrt() + eps) + decay * parameter
        parameter.sub_(lr * update)
        kept_mean.copy_(mean)
        kept_square.copy_(square)


@function
def get_cublasLt_version() -> int:
    """Return a version that has everything."""
    return 130100


@function
def get_num_cublas_streams() -> int:
    """Return the number of streams of grouped products."""
    return 4


# --- the extension --------------------------------------------------------------------------------------------------


class _Name(type):
    """A name of the extension: a function, or an enumeration whose members are numbered as they are used."""

    numbers: dict[str, int]

    def __getattr__(cls, member: str) -> Any:
        if member == "__members__":
            return dict.fromkeys(_mentioned(r"NVTE_Fused_Attn_Backend\.(NVTE_\w+)"), 0)
        if member.startswith("__"):
            raise AttributeError(member)
        return cls.numbers.setdefault(member, len(cls.numbers))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        CALLS[cls.__name__] += 1
        if cls.__name__ not in FUNCTIONS:
            raise NotImplementedError(f"transformer_engine_torch.{cls.__name__} has no stand-in")
        return FUNCTIONS[cls.__name__](*args, **kwargs)


def _extension() -> types.ModuleType:
    module: Any = types.ModuleType("transformer_engine_torch")
    module.DType = DType
    module.FP8FwdTensors = _enumeration(f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT"))
    module.FP8BwdTensors = _enumeration(f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT"))

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(module, name, made := _Name(name, (), {"numbers": {}}))
        return made

    module.__getattr__ = attribute
    own = _mentioned(r"^def (\w+)", within="cpp_extensions")  # that package star-imports the extension beside these
    module.__all__ = ["DType", *sorted(_mentioned(r"\btex\.(\w+)") - own - {"DType"})]
    return module


def _enumeration(names: Iterable[str]) -> SimpleNamespace:
    return SimpleNamespace(**{name: number for number, name in enumerate(names)})


def _mentioned(pattern: str, within: str = "") -> set[str]:
    """Return what a pattern finds in TransformerEngine's Python files."""
    found = util.find_spec("transformer_engine")
    assert found is not None, "run `make te-stub`, which installs TransformerEngine's Python modules"
    folder = Path((found.submodule_search_locations or [""])[0]) / "pytorch"
    files = [path for path in folder.rglob("*.py") if within in str(path)]
    return {name for path in files for name in re.findall(pattern, path.read_text(), re.MULTILINE)}
