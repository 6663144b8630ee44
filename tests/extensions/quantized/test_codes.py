"""Codes and scales of quantized weights: how far they are from the weights, which tensors have them, how they travel,
and what engines that hold them answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.extensions.quantized.codes import FORMATS, CodeChecksums, QuantizedWeights
from asyncrl.models.families import known_families
from asyncrl.parallel import EngineParallel
from asyncrl.weights.bucket import nbytes, plan_buckets, unit_of, views
from asyncrl.weights.checksum import Checksums, differing
from asyncrl.weights.layouts import Pieces
from tests.weights.models import config, digest, model

FP8, INT8 = FORMATS["fp8"], FORMATS["int8"]
WIDE = torch.bfloat16


class Given:
    """Weights in place of a Resharder's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        return ((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items())

    def stream(self, *, merged: str | None = None) -> Iterator[tuple[str, Pieces]]:
        return ((name, Pieces([tensor])) for name, tensor in self.tensors.items())


def quantized(tensors: dict[str, Tensor], kind: Any, architecture: str = "LlamaForCausalLM") -> QuantizedWeights:
    return QuantizedWeights(Given(tensors), architecture, kind, WIDE)  # type: ignore[arg-type]


def sent(weights: QuantizedWeights) -> dict[str, Tensor]:
    """Return what a publish sends, as its buckets hold it."""
    places: dict[str, Tensor] = {}
    for bucket in plan_buckets(weights.described(), 1 << 30, together=unit_of):
        places |= views(torch.empty(nbytes(bucket), dtype=torch.uint8), bucket)
    for name, pieces in weights.stream():
        pieces.copy_to(places[name])
    return places


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (5, 3)], ids=str)
def test_a_value_of_fp8_is_within_half_a_step_of_its_weight(shape: tuple[int, int]) -> None:
    """e4m3 has 3 bits behind the leading one, and equal steps of 2^-9 below 2^-6."""
    weight = torch.randn(shape) * torch.logspace(-6, 0, shape[1])
    codes, scales = FP8.quantize(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    error = (FP8.dequantize(codes, scales, torch.float32) - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, each / 1024) * 1.0001).all()


def test_int8_is_within_half_a_step_per_channel() -> None:
    weight = torch.randn(40, 200) * torch.logspace(-6, 6, 40)[:, None]
    codes, scales = INT8.quantize(weight)
    assert (codes.dtype, scales.shape) == (torch.int8, (40, 1))
    assert (codes.abs().amax(1) == 127).all()
    error = (INT8.dequantize(codes, scales, torch.float32) - weight).abs()
    assert (error <= scales / 2 * 1.0001).all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_zeros_and_grid_values_stay_where_they_are(form: Any) -> None:
    assert not form.dequantize(*form.quantize(torch.zeros(130, 130)), WIDE).any()
    once = form.quantize(torch.randn(130, 260))
    again = form.quantize(form.dequantize(*once, torch.float32))
    assert torch.equal(once[0].float(), again[0].float())


CODED = sorted(name for name, family in known_families().items() if family.adapters and not family.stacks)


@pytest.mark.parametrize("architecture", CODED)
def test_all_linear_maps_of_layers_alone_are_quantized(architecture: str) -> None:
    tensors = model(architecture)
    found = sent(quantized(tensors, "int8", architecture))
    codes = {name for name in found if found[name].dtype is torch.int8}
    kept = ("embed_tokens", "lm_head", "norm", ".gate.weight", "bias", "eh_proj")
    assert codes == {name for name in tensors if not any(part in name for part in kept)}
    assert found.keys() == tensors.keys() | {f"{name}_scale" for name in codes}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors.keys() - codes)


def large() -> dict[str, Tensor]:
    """One layer of a model whose queries, keys and values are whole blocks on two ranks."""
    torch.manual_seed(1)
    sizes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (512, 512)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (256, 512)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (256, 512)),
        "mlp.down_proj": (512, 256),
    }
    return {f"model.layers.0.{name}.weight": torch.randn(size).bfloat16() for name, size in sizes.items()}


LARGE = config(num_attention_heads=4, num_key_value_heads=2, head_dim=128, hidden_size=512)


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_take_half_the_bytes_and_travel_with_their_scales(kind: str) -> None:
    weights = quantized(large(), kind)
    buckets = plan_buckets(weights.described(), 1, together=unit_of)
    assert [[entry.name.rpartition(".")[2] for entry in bucket] for bucket in buckets] == [
        ["weight" + FORMATS[kind].suffix, "weight"] for _ in large()
    ]
    assert sum(map(nbytes, buckets)) < 0.51 * sum(tensor.nbytes for tensor in large().values())


@pytest.mark.parametrize("kind", FORMATS)
def test_simulated_values_are_those_that_the_codes_stand_for(kind: str) -> None:
    real, simulated = quantized(large(), kind), quantized(large(), f"{kind}_simulated")
    codes, values = sent(real), sent(simulated)
    assert values.keys() == large().keys()
    for name, value in values.items():
        assert value.dtype is WIDE
        scales = codes[name + FORMATS[kind].suffix]
        assert torch.equal(value, FORMATS[kind].dequantize(codes[name], scales, WIDE))
    lost = sum((values[n].float() - w.float()).square().sum() for n, w in large().items())
    whole = sum(w.float().square().sum() for w in large().values())
    assert (
        error(real) == error(simulated) == pytest.approx(float(lost / whole) ** 0.5, rel=0.05)
    )  # values are rounded to bfloat16
    assert 0.002 < error(real) < 0.03


def error(weights: QuantizedWeights) -> float:
    return weights.figures()["quantization/error"]


def checksums(tensors: dict[str, Tensor], device: Any = "cuda", tp: int = 2) -> Checksums:
    expected = CodeChecksums(LARGE, EngineParallel(tp), dtype=WIDE, device=device)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    return expected.result()


def test_fp8_engine_answers_as_one_with_its_values() -> None:
    """SGLang hashes the values in bfloat16, without the scales (utils/weight_checker.py)."""
    codes, values = sent(quantized(large(), "fp8")), sent(quantized(large(), "fp8_simulated"))
    assert differing(checksums(values), checksums(codes)) == []


def test_int8_engine_answers_with_its_codes_and_scales() -> None:
    codes = sent(quantized(large(), "int8"))
    found = checksums(codes)
    qkv = [codes[f"model.layers.0.self_attn.{x}_proj.weight_scale"].chunk(2) for x in "qkv"]
    output = codes["model.layers.0.self_attn.o_proj.weight"].chunk(2, 1)
    for rank in range(2):
        at = "model.layers.0.self_attn"
        assert found[rank][f"{at}.qkv_proj.weight_scale"] == digest(torch.cat([part[rank] for part in qkv]), "cuda")
        assert found[rank][f"{at}.o_proj.weight"] == digest(output[rank], "cuda")
        assert found[rank][f"{at}.o_proj.weight_scale"] == digest(codes[f"{at}.o_proj.weight_scale"], "cuda")


@pytest.mark.parametrize(("kind", "wrong"), [("fp8", "gate_up_proj.weight"), ("int8", "gate_up_proj.weight_scale")])
def test_a_wrong_scale_is_seen(kind: str, wrong: str) -> None:
    codes = sent(quantized(large(), kind))
    right = checksums(codes)
    codes[f"model.layers.0.mlp.up_proj.weight{FORMATS[kind].suffix}"][0, 0] *= 1.01
    assert differing(right, checksums(codes)) == [f"model.layers.0.mlp.{wrong}"]
