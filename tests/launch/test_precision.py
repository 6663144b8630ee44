"""trainer.layers=auto takes TransformerEngine where it can run, and a run that goes on keeps its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.config.training import MOST_BETA
from asyncrl.errors import ConfigError
from asyncrl.launch import precision
from tests.fakes import tiny_config

GPU: dict[str, Any] = {"trainer.device": "cuda", "trainer.dtype": "bfloat16"}
FP8 = {"format": "hybrid", "recipe": "blockwise"}


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda name: object() if name in packages else None)


def resolved(setting: str = "auto", before: dict[str, Any] | None = None, **changes: Any) -> str:
    return precision.resolve_layers(tiny_config(**{"trainer.layers": setting, **changes}), 8, before).trainer.layers


def test_auto_needs_a_gpu_and_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *precision.PACKAGES)
    assert resolved(**GPU) == "transformer_engine"
    assert resolved(**{"trainer.device": "cpu"}) == "local"
    assert resolved("local", **GPU) == "local"
    for present in precision.PACKAGES:
        install(monkeypatch, present)
        assert resolved(**GPU) == "local"


def test_impossible_choice_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "transformer_engine")
    with pytest.raises(ConfigError, match=r"trainer\.layers.*transformer_engine_torch cannot be found.*set local"):
        resolved("transformer_engine", **GPU)
    with pytest.raises(ConfigError, match=r"trainer\.layers.*no CPU kernels"):
        resolved("transformer_engine", **{"trainer.device": "cpu"})


def test_run_that_goes_on_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *precision.PACKAGES)
    assert resolved(before={"trainer": {"layers": "local"}}, **GPU) == "local"
    assert resolved(before={"trainer": {}}, **GPU) == "local"  # written before there was a choice
    assert resolved(before={"trainer": {"layers": "transformer_engine"}}, **GPU) == "transformer_engine"
    assert resolved("transformer_engine", before={"trainer": {"layers": "local"}}, **GPU) == "transformer_engine"
    install(monkeypatch)
    with pytest.raises(ConfigError, match="cannot be found"):
        resolved(before={"trainer": {"layers": "transformer_engine"}}, **GPU)


def test_fp8_needs_layers_of_transformer_engine_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *precision.PACKAGES)
    assert resolved(**GPU, **{"trainer.fp8": FP8}) == "transformer_engine"
    with pytest.raises(ConfigError, match=r"trainer\.fp8.*trainer\.layers=local"):
        resolved("local", **GPU, **{"trainer.fp8": FP8})
    with pytest.raises(ConfigError, match=r"trainer\.fp8.*no CPU kernels"):
        resolved(**{**GPU, "trainer.device": "cpu", "trainer.fp8": FP8})
    with pytest.raises(ConfigError, match=r"trainer\.fp8.*bfloat16"):
        tiny_config(**{"trainer.fp8": FP8, "trainer.dtype": "float32"})
    with pytest.raises(ConfigError, match=r"trainer\.fp8\.recipe"):
        tiny_config(**{"trainer.fp8": {"format": "hybrid", "recipe": "delayed"}})


def test_bfloat16_moments_need_te_and_moving_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"trainer.optimizer.moments_dtype": "bfloat16"}
    install(monkeypatch, *precision.PACKAGES)
    assert resolved("local", **GPU, **low) == "local"  # the optimizer is TransformerEngine's whatever the layers
    with pytest.raises(ConfigError, match=r"moments_dtype.*FusedAdam.*no CPU kernels"):
        resolved(**{**GPU, **low, "trainer.device": "cpu"})
    install(monkeypatch)
    with pytest.raises(ConfigError, match=r"moments_dtype.*cannot be found.*set float32"):
        resolved(**GPU, **low)
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.beta2.*never decrease.*0\.99"):
        tiny_config(**low, **{"trainer.optimizer.beta2": 0.999})


def test_bfloat16_second_moment_falls_at_allowed_rates() -> None:
    for start in torch.linspace(1.0, 2.0, 129).bfloat16():
        assert start * MOST_BETA != start
    assert any(start * 0.998 == start for start in torch.linspace(1.0, 2.0, 129).bfloat16())
