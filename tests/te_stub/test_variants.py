"""What changes no bit of an update with local layers changes none with TransformerEngine's: recomputation of
activations, which Megatron leaves to TransformerEngine under FP8, their offload, and overlapped communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration import variants
from tests.te_stub.settings import FP8, TE

FP8_RECOMPUTED = {"single": "qwen3-untied", "pp2": "qwen3-untied", "pp2-vpp2": "qwen3-moe", "ep2": "qwen3-moe"}


@pytest.fixture(autouse=True)
def _layers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_layers(monkeypatch, TE)


def set_layers(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    layouts = {name: {**layout, **settings} for name, layout in variants.LAYOUTS.items()}
    monkeypatch.setattr(variants, "LAYOUTS", layouts)


@pytest.mark.parametrize("layout", ["single", "tp2-sp-ep2"])
def test_recomputed_activation_of_grouped_experts_changes_no_bit(layout: str, tmp_path: Path) -> None:
    variants.run(tmp_path, layout, {"qwen3-moe": {"moe_act": variants.selective("moe_act")}})


@pytest.mark.parametrize("layout", variants.RECOMPUTED)
def test_recomputation_changes_no_bit(layout: str, tmp_path: Path) -> None:
    variants.check_recomputation(tmp_path, layout)


@pytest.mark.parametrize("layout", FP8_RECOMPUTED)
def test_recomputation_in_fp8_changes_no_bit(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_layers(monkeypatch, {**TE, **FP8})
    model = FP8_RECOMPUTED[layout]
    counts = variants.run(tmp_path, layout, {model: variants.FULL})[model]
    assert min(count["attention"] for count in counts.values()) > 0, counts


@pytest.mark.parametrize("layout", variants.OVERLAPPED)
def test_overlapped_communication_changes_no_bit(layout: str, tmp_path: Path) -> None:
    variants.check_overlap(tmp_path, layout, variants.OVERLAPPED[layout], **variants.AGAIN)


def test_gradients_of_parts_are_reduced_once(tmp_path: Path) -> None:
    variants.check_overlap(tmp_path, "dp2", ["llama-tied"], **variants.PARTS)


@pytest.mark.parametrize("layout", ["single", "pp2-vpp2", "tp2-sp-ep2"])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_activations_in_host_memory_change_no_bit(
    fp8: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_layers(monkeypatch, {**TE, **FP8} if fp8 else TE)
    for counts in variants.run(tmp_path, layout, dict.fromkeys(["qwen3-moe"], variants.OFFLOAD)).values():
        assert min(count["activations"] for count in counts.values()) > 0, counts
        assert max(count["layers"] for count in counts.values()) == 1, counts
