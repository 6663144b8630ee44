"""Quantized weights of a frozen base (trainer.lora.base; QLoRA, arXiv 2305.14314).

A row of a weight is divided into blocks of BLOCK numbers. Each block has one scale, its largest magnitude in bfloat16,
which is exact if the weights were in bfloat16:

    nf4     code c of 4 bits stands for scale * NF4[c]           two codes in a byte, the first in the upper half,
            the nearest of 16 quantiles of the normal            as in bitsandbytes
            distribution
    int8    code c of 8 bits stands for scale * c / 127

Blocks never cross the shards of tensor parallelism, so the codes of a shard are those of the whole weight; a layer
whose shard has rows of another width is refused. Dequantized weights are quantized to the same codes and scales again:
the largest number of a block is its scale, and rounding to bfloat16 moves no other one by half of a code.

A layer keeps only codes and scales. Forward dequantizes the weight for its product, and backward does it again.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.layers import AdaptedLinear, linears
from asyncrl.extensions.qlora.extension import BLOCK
from asyncrl.weights.reshard import Found, Resharder

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of QLoRA's appendix E, as bitsandbytes has them in float32."""
Kind = Literal["int8", "nf4"]


class PackedWeight(nn.Module):
    """The codes and scales of a weight. They are no part of a state_dict: a run stores them once (see `states`)."""

    codes: Tensor
    scales: Tensor

    def __init__(self, kind: Kind, codes: Tensor, scales: Tensor, like: Tensor) -> None:
        super().__init__()
        self.kind, self.shape, self.dtype = kind, like.shape, like.dtype
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedWeight:
        """Move the buffers, but keep the format of the scales."""
        super()._apply(fn, recurse)
        self.scales = self.scales.to(torch.bfloat16)
        return self

    def dequantized(self) -> Tensor:
        """Return the weight that the codes stand for, in the number format of the original."""
        return dequantize(self.kind, self.codes, self.scales, self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def quantize(weight: Tensor, kind: Kind) -> PackedWeight:
    """Quantize a matrix whose rows are whole blocks."""
    blocks = weight.detach().reshape(-1, BLOCK).float()
    scales = blocks.abs().amax(1).to(torch.bfloat16)
    # A block of zeros has scale 0; any code of 0 stands for it.
    parts = blocks / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if kind == "int8":
        codes = (parts * 127).round_().clamp_(-127, 127).to(torch.int8).flatten()
    else:
        values = _values(weight.device)
        nearest = torch.bucketize(parts, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
        codes = (nearest[:, 0] << 4) | nearest[:, 1]
    return PackedWeight(kind, codes, scales, weight)


def dequantize(kind: Kind, codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the weight that codes and scales stand for; each number is computed in float32 and rounded once."""
    if kind == "int8":
        values = codes.float().view(-1, BLOCK).mul_((scales.float() / 127)[:, None])
        return values.to(dtype).view(shape)
    if (library := _bitsandbytes()) is not None:
        state = library.QuantState(scales.float(), shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
        state.code = _values(codes.device)
        found: Tensor = library.dequantize_4bit(codes.view(-1, 1), state)
        return found
    pairs = _pairs(codes.device)[codes.int()]  # both numbers of a byte at once
    return pairs.view(-1, BLOCK).mul_(scales.float()[:, None]).to(dtype).view(shape)


@cache
def _values(device: torch.device) -> Tensor:
    """Return the numbers that the codes stand for, [16]."""
    return torch.tensor(NF4, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two numbers that each byte of codes stands for, [256, 2]."""
    values = _values(device)
    return torch.cartesian_prod(values, values)


@cache
def _bitsandbytes() -> Any:
    """Return bitsandbytes' functions, which compute the same numbers faster, if it is installed and runs."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except (ImportError, OSError, RuntimeError):
        return None


class _PackedProduct(torch.autograd.Function):
    """x W^T for a quantized W without a gradient. (A dequantized weight in Megatron's function for frozen weights would
    be saved for backward, that of all layers at once.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: PackedWeight, group: Any) -> Tensor:
        ctx.packed, ctx.group = packed, group
        return x.matmul(packed.dequantized().t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        of_x = gradients[0].matmul(ctx.packed.dequantized())
        if ctx.group is not None:
            dist.all_reduce(of_x, group=ctx.group)
        return of_x, None, None


def packed_linear(x: Tensor, packed: PackedWeight, group: Any = None) -> Tensor:
    """Return x W^T. In backward, the gradient of x is summed over a group of ranks if one is given."""
    found: Tensor = _PackedProduct.apply(x, packed, group)
    return found


class _Quantized:
    """Put before the class of one of Megatron's parallel linear layers. Its `packed` takes the place of `weight`, of
    which only shape and number format stay."""

    packed: PackedWeight

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        """Compute as Megatron's linear_with_frozen_weight."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        out = packed_linear(input, self.packed, tp_group if allreduce_dgrad else None)
        return out if bias is None else out + bias


@cache
def _quantized(of: Any) -> Any:
    return type(f"Quantized{of.__name__}", (_Quantized, of), {})


def pack_base(weights: Resharder, kind: Kind) -> None:
    """Quantize the weights of this rank's linear layers with adapters. Raises ConfigError if one of them does not
    consist of blocks."""
    for shard in linears(weights):
        if isinstance(shard.module, AdaptedLinear):
            pack(shard.module, kind, " and ".join(shard.found.hf_names()))


def quantized(weights: Resharder) -> list[Found]:
    """Return the quantized weights in whose export this rank takes part."""
    return [one for one in weights.exported if hasattr(weights.layer(one[0], one[1]), "packed")]


def pack(linear: Any, kind: Kind, name: str) -> None:
    """Quantize the frozen weight of one of Megatron's parallel linear layers in place. Raises ConfigError, with the
    layer's name, if its rows are no whole blocks."""
    if (width := linear.weight.shape[1]) % BLOCK:
        remedy = (
            f"{name} has {width} inputs on each rank, which is no multiple of the {BLOCK} numbers of a block: lower "
            "trainer.tensor_parallel, leave the layer out of trainer.lora.targets, or set none."
        )
        raise ConfigError("trainer.lora.base", kind, remedy)
    weight = linear.weight
    linear.packed = quantize(weight, kind)
    del linear.weight
    linear.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    linear.__class__ = _quantized(type(linear))  # type: ignore[arg-type]
