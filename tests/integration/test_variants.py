"""Settings that save memory or time change no bit of an update: recomputation of activations, in which routers replay
the same experts again, their offload, and communication that overlaps with computation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import Config, load
from asyncrl.launch.checks import check_model
from asyncrl.models.architectures import routing_shape
from asyncrl.models.tiny import write_random_model
from tests.fakes import changed, reusing, tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.test_routing import foreign
from tests.integration.test_trainer import LAYOUTS, MODELS, UNEVEN, VOCAB, drawn_groups

pytestmark = pytest.mark.integration

Variants = dict[str, dict[str, Any]]


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute.granularity": "selective", "recompute.modules": list(modules)}


FULL: Variants = {
    "uniform": {"recompute.granularity": "full"},
    "block": {"recompute.granularity": "full", "recompute.method": "block"},
}
TWO_LAYERS: Variants = {"two layers": {"recompute.granularity": "full", "recompute.num_layers": 2}}
RECOMPUTE: dict[str, Variants] = {
    "qwen3-untied": {**FULL, "selective": selective("core_attn", "layernorm", "mlp")},
    "qwen3-moe": {**FULL, "selective": selective("core_attn", "layernorm", "mlp", "moe")},
    "deepseek": {**FULL, "selective": selective("core_attn", "mla_up_proj", "layernorm", "shared_experts")},
}
RECOMPUTED = {
    "single": ["qwen3-untied", "deepseek"],
    "tp2-sp": ["qwen3-untied"],
    "pp2": ["qwen3-untied", "deepseek"],
    "pp2-vpp2": ["qwen3-moe"],
    "cp2": ["qwen3-untied"],
    "ep2": ["qwen3-moe"],
    "tp2-sp-ep2": ["qwen3-moe", "deepseek"],
}
UNCLIPPED = {"trainer.optimizer.clip_grad": 0.0}
"""The norm is a sum over shards, which depend on the buckets: its last bits differ, and so would clipped weights."""
OVERLAP: Variants = {
    "reduce": {"overlap_grad_reduce": True},
    "gather": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
OVERLAP = {name: {**changes, "megatron.ddp.bucket_size": 5000} for name, changes in OVERLAP.items()}
OVERLAP["recompute"] = OVERLAP["gather"] | FULL["uniform"]
OVERLAPPED = {
    "dp2": ["llama-tied", "qwen3-untied"],
    "cp2": ["qwen3-untied"],
    "ep2": ["qwen3-moe"],
    "pp2-vpp2-ep2": ["qwen3-moe"],
}


def repeated(layouts: Iterable[str], *among: str) -> list[Any]:
    """Return the layouts as parameters. Those that others contain are campaigns."""
    return [pytest.param(name, marks=[pytest.mark.campaign] if name in among else []) for name in layouts]


def run(folder: Path, layout: str, variants: dict[str, Variants], **algo: Any) -> dict[str, dict[str, dict[str, int]]]:
    """Train a model of each name with all of its variants. Returns what ran in backward, per model and variant."""
    for model in variants:
        config = prepare(folder / model, model, layout, variants[model], algo)
    run_ranks("rank_variants.py", *(str(folder / model) for model in variants), world=config.trainer.world_size)
    return {model: json.loads((folder / model / "counts.json").read_text()) for model in variants}


def prepare(folder: Path, model: str, layout: str, variants: Variants, algo: dict[str, Any]) -> Config:
    """Write a model, a batch and the settings; routers replay random experts if there are some."""
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    write_random_model(folder / "model", **{**sizes, "tied": False, "seed": 1, "dtype": "float32", **MODELS[model]})
    hf = json.loads((folder / "model" / "config.json").read_text())
    shape = routing_shape(hf)
    groups = foreign(shape) if shape else drawn_groups(seed=3)
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(groups))
    values = tiny_values(**{"algo.routing_replay": "R3" if shape else "none", "algo.mini_batches": 2, **algo})
    values["trainer"].update({"micro_batch_tokens": UNEVEN, **LAYOUTS[layout]})
    config = load(values)
    for changes in variants.values():
        check_model(load({**values, "trainer": changed(config.trainer.model_dump(), changes)}), hf)
    (folder / "variants.json").write_text(json.dumps(variants))
    (folder / "config.json").write_text(config.model_dump_json())
    return config


@pytest.mark.parametrize("layout", repeated(RECOMPUTED, "single", "ep2", "tp2-sp", "pp2"))
def test_recomputation_changes_no_bit_of_figures_gradients_and_weights(layout: str, tmp_path: Path) -> None:
    variants = {model: RECOMPUTE[model] for model in RECOMPUTED[layout]}
    if "pp2-vpp2" not in layout:
        variants = {model: {**found, **TWO_LAYERS} for model, found in variants.items()}
    for counts in run(tmp_path, layout, variants).values():
        assert min(count["attention"] for count in counts.values()) > 0, counts
        assert counts["block"]["attention"] <= counts["uniform"]["attention"]


@pytest.mark.parametrize("layout", repeated(OVERLAPPED, "cp2", "ep2"))
def test_overlapped_communication_changes_no_bit_of_figures_and_weights(layout: str, tmp_path: Path) -> None:
    variants = dict.fromkeys(OVERLAPPED[layout], OVERLAP)
    for counts in run(
        tmp_path, layout, variants, **UNCLIPPED, **{"algo.epochs": 2, "algo.kl.measure_every": 1}
    ).values():
        assert min(count["reductions"] for count in counts.values()) > 0, counts


def test_gradients_of_parts_are_reduced_once_with_overlapped_communication(tmp_path: Path) -> None:
    parts = {"trainer.batch_parts": 2, "algo.mini_batches": 1}
    for counts in run(tmp_path, "dp2", {"llama-tied": OVERLAP}, **UNCLIPPED, **parts).values():
        assert min(count["reductions"] for count in counts.values()) > 0, counts


def test_a_critic_is_trained_alike_with_overlapped_communication(tmp_path: Path) -> None:
    run(tmp_path, "dp2", {"llama-tied": OVERLAP}, **UNCLIPPED, **{"algo.advantage": "gae"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_whose_states_leave_the_device_trains_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """Storages of the CPU are moved as those of a GPU would be, and the weights start anew after the first batch."""
    algo = {"trainer.dtype": dtype, **reusing(reset_every=1, reset_share=0.5)}
    counts = run(tmp_path, "dp2", {"llama-tied": {"offload": {"optimizer.offload": True}}}, **algo)
    assert counts["llama-tied"]["offload"]["away"] > 0


OFFLOAD: Variants = {"alone": {"activation_offload": True}}
OFFLOAD |= {f"and {name}": changes | OFFLOAD["alone"] for name, changes in FULL.items()}
OFFLOADED = {
    "single": ["llama-tied", "deepseek"],
    "tp2-sp": ["qwen3-untied"],
    "pp2": ["qwen3-untied"],
    "pp2-vpp2": ["qwen3-moe"],
    "tp2-sp-ep2": ["qwen3-moe"],
}


@pytest.mark.parametrize("layout", repeated(OFFLOADED, "tp2-sp-ep2"))
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
    counts = run(tmp_path, "single", {"qwen3-untied": OFFLOAD}, **adapters)["qwen3-untied"]
    assert min(count["activations"] for count in counts.values()) > 0, counts
