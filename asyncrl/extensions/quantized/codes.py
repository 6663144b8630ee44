"""Weights of the engines with 8 bits (quantized.format), which the trainers quantize at each publish.

    fp8     e4m3, one scale for a block of 128 x 128       X.weight_scale_inv, as in DeepSeek-V3's files
    int8    -127 to 127, one scale for an output channel   X.weight_scale, as SGLang's w8a8_int8

A number stands for code * scale, where a block's scale is its largest magnitude over the largest code. Scales travel as
float32 tensors of their own, each before its codes, and the engines load both as they are. Where the format is only
simulated, the values travel instead, in the engines' number format. Only the linear maps of the layers are quantized:
neither embeddings, output layer, norms, routers and biases, nor what the trainer holds, saves and exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.extensions.quantized.fits import BLOCK
from asyncrl.models.family import Layout
from asyncrl.schema import POLICY
from asyncrl.weights.checksum import ExpectedChecksums, SentWeights
from asyncrl.weights.engine_layout import CUTS, CUTS_OF_EXPERTS, EngineParameter
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.mapping import Mapping


@dataclass(frozen=True)
class CodeFormat:
    """A format of codes and scales. `rows` and `columns` are those of a block; None for all of them."""

    dtype: torch.dtype
    largest: float
    rows: int
    columns: int | None
    suffix: str
    """What a scale's name has after that of its weight."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of a matrix, and their scales, [blocks of rows, blocks of columns]. Blocks at the lower and
        right edge may be smaller."""
        height, width = weight.shape
        columns = self.columns or width
        padded = pad(weight.float(), (0, -width % columns, 0, -height % self.rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, self.rows))
        scales = (blocks.abs().amax((1, 3)) / self.largest).clamp_(min=torch.finfo(torch.float32).tiny)
        parts = (blocks / scales[:, None, :, None]).clamp_(-self.largest, self.largest)
        codes = parts if self.dtype.is_floating_point else parts.round_()
        return codes.to(self.dtype).flatten(2).flatten(0, 1)[:height, :width].contiguous(), scales

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values that codes stand for; each is computed in float32 and rounded once, as in SGLang."""
        height, width = codes.shape
        each = scales.repeat_interleave(self.rows, 0).repeat_interleave(self.columns or width, 1)
        return (codes.float() * each[:height, :width]).to(dtype)


FORMATS: dict[str, CodeFormat] = {
    "fp8": CodeFormat(torch.float8_e4m3fn, 448.0, BLOCK, BLOCK, "_scale_inv"),
    "int8": CodeFormat(torch.int8, 127.0, 1, None, "_scale"),
}


WHOLE, DIVIDES_INPUTS = CUTS[Layout.WHOLE][0], {*CUTS[Layout.OUT], *CUTS[Layout.DOWN], *CUTS_OF_EXPERTS[Layout.DOWN]}


def _of_scales(rule: EngineParameter) -> EngineParameter:
    """Return the rule of the scales of a parameter's output channels, [channels, 1], in int8."""
    suffix = FORMATS["int8"].suffix
    parts = tuple((name + suffix, WHOLE if cut in DIVIDES_INPUTS else cut) for name, cut in rule.parts)
    return EngineParameter(rule.engine + suffix, parts, torch.float32)


class CodeChecksums(ExpectedChecksums):
    """Checksums of engines with codes. Codes of int8 and their scales are hashed as they are. Of codes of fp8, which
    come after their scales, SGLang hashes the values in bfloat16."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """Take the arguments of ExpectedChecksums."""
        super().__init__(*arguments, **more)
        self._layout.add(tuple(_of_scales(rule) for rule in self._layout.rules))
        self._scales: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add one full HF tensor, codes or scales."""
        fp8 = FORMATS["fp8"]
        if name.endswith(fp8.suffix):
            self._scales[name.removesuffix(fp8.suffix)] = tensor.clone()
            return
        if tensor.dtype is fp8.dtype:
            tensor = fp8.dequantize(tensor, self._scales.pop(name), torch.bfloat16)
        super().add(name, tensor)


class QuantizedWeights:
    """The weights that a publisher sends, with quantized linear maps."""

    checksums = CodeChecksums

    def __init__(self, weights: SentWeights, architecture: str, kind: str, wide: torch.dtype) -> None:
        """`wide` is the number format of the engines."""
        self._weights, self._mapping, self._wide = weights, Mapping(architecture), wide
        self._format, self._simulated = FORMATS[kind.removesuffix("_simulated")], kind.endswith("_simulated")
        self._squares: list[Tensor] = []

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and shape of what `stream` yields."""
        for name, dtype, shape in self._weights.described():
            if not self._mapping.is_linear(name):
                yield name, dtype, shape
            elif self._simulated:
                yield name, self._wide, shape
            else:
                scales = self._format.quantize(torch.empty(shape, device="meta"))[1].shape
                yield name + self._format.suffix, torch.float32, scales
                yield name, self._format.dtype, shape

    def stream(self, *, merged: str | None = POLICY) -> Iterator[tuple[str, Pieces]]:
        """Yield (HF name, full tensor) as `Resharder.stream`, with the scales of a weight before its codes."""
        self._squares.clear()
        for name, pieces in self._weights.stream(merged=merged):
            if not self._mapping.is_linear(name):
                yield name, pieces
                continue
            weight = pieces.tensor()
            codes, scales = self._format.quantize(weight)
            values = self._format.dequantize(codes, scales, torch.float32)
            self._squares.append(torch.stack([(values - weight).square().sum(), weight.float().square().sum()]))
            if self._simulated:
                yield name, Pieces([values])
            else:
                yield name + self._format.suffix, Pieces([scales])
                yield name, Pieces([codes])

    def figures(self) -> dict[str, float]:
        """Return the norm of the error of the weights that were sent last by this rank, relative to theirs."""
        lost, whole = torch.stack(self._squares).sum(0).tolist() if self._squares else (0.0, 1.0)
        return {"quantization/error": float((lost / whole) ** 0.5)}
