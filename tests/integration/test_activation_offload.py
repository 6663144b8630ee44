"""Activations in host memory (asyncrl/extensions/offload) change no bit of an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.updates import MODELS
from tests.integration.variants import OFFLOAD, RECOMPUTE, run

pytestmark = pytest.mark.integration

OFFLOADED = {
    "single": ["llama-tied", "deepseek"],
    "tp2-sp": ["qwen3-untied"],
    "pp2": ["qwen3-untied"],
    "pp2-vpp2": ["qwen3-moe"],
    "tp2-sp-ep2": ["qwen3-moe"],
}


@pytest.mark.parametrize(
    "layout", [name if name != "tp2-sp-ep2" else pytest.param(name, marks=pytest.mark.campaign) for name in OFFLOADED]
)
def test_activations_in_host_memory_change_no_bit(layout: str, tmp_path: Path) -> None:
    """Storages of the CPU are copied as those of a GPU would be, of any size."""
    variants = {
        model: OFFLOAD
        | {"and selective": RECOMPUTE.get(model, RECOMPUTE["qwen3-untied"])["selective"] | OFFLOAD["alone"]}
        for model in OFFLOADED[layout]
    }
    for counts in run(tmp_path, layout, variants).values():
        assert min(count["activations"] for count in counts.values()) > 0, counts
        assert max(count["layers"] for count in counts.values()) == 1, counts
        assert counts["and uniform"]["activations"] < counts["alone"]["activations"] / 2


@pytest.mark.parametrize("base", ["none", "int8"])
def test_activations_of_adapters_in_host_memory_change_no_bit(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen base, quantized or not, stays on the device."""
    monkeypatch.setitem(MODELS, "qwen3-untied", MODELS["qwen3-untied"] | {"hidden": 64, "intermediate": 64})  # blocks
    adapters = {"trainer.lora.rank": 4, "trainer.lora.base": base}
    models = ["qwen3-untied"] if base == "int8" else ["qwen3-untied", "qwen3-moe", "deepseek"]
    for counts in run(tmp_path, "single", dict.fromkeys(models, OFFLOAD), **adapters).values():
        assert min(count["activations"] for count in counts.values()) > 0, counts
