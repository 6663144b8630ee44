"""Quantized weights are those of bitsandbytes, and a layer computes with them as with a dense frozen weight."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.errors import ConfigError  # noqa: E402
from asyncrl.extensions.qlora import packed as quantized  # noqa: E402
from asyncrl.extensions.qlora.packed import BLOCK, Kind, pack, packed_linear, quantize  # noqa: E402

KINDS: list[Kind] = ["int8", "nf4"]
DTYPES = [torch.bfloat16, torch.float32]

# bitsandbytes 0.50.2 on a CPU: functional.quantize_4bit(known(), blocksize=64, quant_type="nf4") and dequantize_4bit.
CODES = (
    "0136adf0147adf0147adf0147bdf0247bdf0247bef0248bef0248bef1258bef1258bef1258cef1359cef1359ce01369ce01369ce01369ce01369ce"
    "0136ade0136adf0137adf0147adf0147bdf0247bdf0247bdf0248bef0248bef0258bef1258bef1258cef1258cef1359cef1359ce01369ce01369ce"
    "01369ce0136ace0136ade0136adf0147adf0147adf0147bdf0247bdf0247bef0248bef0248bef1258bef1258bef1258cef1359cef1359ce01369ce"
    "01369ce01369ce01369ce0136ade0136adf0137adf0147adf0147bdf0247bdf0247bdf0248bef0248bef0258bef1258bef1258cef1258cef1359ce"
    "f1359ce01369ce01369ce01369ce0136ace0136a"
)
SCALES = [1.890625, 2.0, 0.05859375, 0.0625, 0.003692626953125, 0.00390625, 7.5, 8.0]
DEQUANTIZED = {
    torch.bfloat16: "3a72e720ea032f884c58cbe90bb3e0a87f74688a6cdf4ee311403efb59e65953",
    torch.float32: "cb4ec9604c38fa796e6fb8ed4ef67e4d86844381b655b005e07ef35e4f607466",
}


def known() -> Tensor:
    """A matrix whose numbers bfloat16 represents."""
    rows = ((torch.arange(4 * 128) * 37 + 11) % 257 - 128).view(4, 128) / 64
    return rows * torch.tensor([1.0, 2**-5, 2**-9, 4.0])[:, None]


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * 0.02).bfloat16().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_codes_and_scales_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    packed = quantize(known().to(dtype), "nf4")
    assert bytes(packed.codes.tolist()).hex() == CODES
    assert packed.scales.tolist() == SCALES
    values = packed.dequantized()
    assert values.dtype == dtype
    assert hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest() == DEQUANTIZED[dtype]


@pytest.mark.parametrize(("kind", "error", "share"), [("int8", 0.007, 0.52), ("nf4", 0.095, 0.27)])
def test_quantized_weight_is_close_and_takes_its_share(kind: Kind, error: float, share: float) -> None:
    weight = random(192, 576)
    packed = quantize(weight, kind)
    difference = (packed.dequantized().float() - weight.float()).norm() / weight.float().norm()
    assert 0 < difference < error
    assert packed.nbytes <= share * weight.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_weights_have_the_same_codes_and_scales(kind: Kind, dtype: torch.dtype) -> None:
    """So that they can be stored and published as numbers. A block of zeros is one of zeros again."""
    for seed in range(20):
        weight = random(16, 256, dtype, seed)
        weight[3, :BLOCK] = 0
        once = quantize(weight, kind)
        twice = quantize(once.dequantized(), kind)
        assert torch.equal(once.codes, twice.codes)
        assert torch.equal(once.scales, twice.scales)
        assert not once.dequantized()[3, :BLOCK].any()


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_whole_blocks_have_the_whole_weights_codes(kind: Kind) -> None:
    weight = random(8, 256)
    whole = quantize(weight, kind).dequantized()
    for axis in (0, 1):
        parts = [quantize(part.contiguous(), kind).dequantized() for part in weight.chunk(2, axis)]
        assert torch.equal(torch.cat(parts, axis), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layer_computes_as_dequantized_and_saves_0(kind: Kind, dtype: torch.dtype) -> None:
    packed = quantize(random(48, 128, dtype), kind)
    x, of_y = random(10, 128, dtype, seed=1), random(10, 48, dtype, seed=2)
    saved: list[Tensor] = []

    def product(function: Any) -> tuple[Tensor, Tensor]:
        own = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = function(own)
        y.backward(of_y)
        return y.detach(), own.grad  # type: ignore[return-value]

    found = product(lambda own: packed_linear(own, packed))
    assert not saved
    dense = product(lambda own: own @ packed.dequantized().t())
    assert saved
    assert all(torch.equal(one, two) for one, two in zip(found, dense, strict=True))


def test_rows_that_are_no_whole_blocks_are_refused_by_name() -> None:
    class Linear(torch.nn.Linear):
        pass

    with pytest.raises(ConfigError, match=r"nf4.*down_proj\.weight has 96 inputs"):
        pack(Linear(96, 8), "nf4", "model.layers.0.mlp.down_proj.weight")


def test_scales_stay_in_bfloat16_when_a_model_is_cast() -> None:
    packed = quantize(random(2, 64), "nf4")
    moved = torch.nn.ModuleList([packed]).float()[0]
    assert (packed.scales.dtype, packed.codes.dtype) == (torch.bfloat16, torch.uint8)
    assert moved is packed
    assert not packed.state_dict()


def test_bitsandbytes_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(quantized.importlib, "import_module", missing)
    quantized._bitsandbytes.cache_clear()
    assert quantized._bitsandbytes() is None
    quantized._bitsandbytes.cache_clear()
