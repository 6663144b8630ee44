"""FP8 for the stand-in: casts with one scale for each tensor, and products of such tensors.

Numbers are rounded to torch's own FP8 types, and products have the alignment that cuBLAS demands. The other recipes'
casts are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
ALIGNMENT = 16
"""Number of elements by which the summed dimension of a product must be divisible."""


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """Cast a tensor to the quantizer's FP8 type, into `out` if it is given."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    assert type(quantizer) is Float8CurrentScalingQuantizer, f"{type(quantizer).__name__} has no stand-in"
    values = tensor.detach().float()
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    kind = TYPES[quantizer.dtype.name]
    most = torch.finfo(kind).max
    scale = torch.where(largest > 0, most / largest, torch.ones(()))
    data = (values * scale).clamp(-most, most).to(kind).view(torch.uint8)
    parts = {
        "data": data if quantizer.rowwise_usage else None,
        "data_transpose": data.movedim(-1, 0).contiguous() if quantizer.columnwise_usage else None,
        "fp8_scale_inv": (1 / scale).view(1),
    }
    if out is not None:
        for into, part in zip((out._data, out._transpose, out._scale_inv), parts.values(), strict=True):
            if into is not None and part is not None:
                into.copy_(part)
        return out
    common: dict[str, Any] = {**parts, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return Float8TensorStorage(**common, fake_dtype=tensor.dtype)
    return Float8Tensor(**common, shape=tensor.shape, dtype=tensor.dtype, device=tensor.device)


def split_quantize(tensor: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """Cast the parts of a tensor."""
    return [quantize(part, one) for part, one in zip(tensor.split(list(sizes)), quantizers, strict=True)]


def create_empty_quantized_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
    """Return a tensor to be filled."""
    alone = quantizer.copy()
    alone.with_amax_reduction = False
    return quantize(torch.zeros(shape, dtype=dtype), alone)


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Move the last dimension to the front."""
    return data.movedim(-1, 0).contiguous()


def fused_multi_row_padding(given: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]) -> None:
    """Copy the rows of each expert to where its padded rows begin, and fill the rest with zeros."""
    out.zero_()
    for into, part in zip(out.split(list(padded)), given.split(list(sizes)), strict=True):
        into[: len(part)] = part


def fused_multi_row_unpadding(given: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy the rows of each expert without its padding."""
    for into, part in zip(out.split(list(sizes)), given.split(list(padded)), strict=True):
        into.copy_(part[: len(into)])


def plain(factor: Any) -> tuple[Tensor, bool]:
    """Return a factor of a product in float32, and whether it was in FP8."""
    if type(factor) in (Tensor, torch.nn.Parameter):
        return factor.float(), False
    return factor.dequantize(dtype=torch.float32), True


FUNCTIONS = (
    quantize,
    split_quantize,
    create_empty_quantized_tensor,
    fp8_transpose,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
)
