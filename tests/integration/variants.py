"""Settings that save memory or time, and pairs of trainings with and without them that must be equal bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, load
from asyncrl.extensions.routing_replay.encoding import routing_shape
from asyncrl.launch.checks.model import check_model
from asyncrl.models.tiny import write_random_model
from tests.fakes import changed, tiny_config, tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.updates import LAYOUTS, MODELS, UNEVEN, VOCAB, drawn_groups, foreign

Variants = dict[str, dict[str, Any]]


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute.granularity": "selective", "recompute.modules": list(modules)}


FULL: Variants = {
    "uniform": {"recompute.granularity": "full"},
    "block": {"recompute.granularity": "full", "recompute.method": "block"},
}
OFFLOAD: Variants = {"alone": {".offload.activations": True}}
OFFLOAD |= {f"and {name}": changes | OFFLOAD["alone"] for name, changes in FULL.items()}
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
OVERLAP = {name: {**changes, "grad_bucket_size": 5000} for name, changes in OVERLAP.items()}
OVERLAP["recompute"] = OVERLAP["gather"] | FULL["uniform"]
OVERLAPPED = {
    "dp2": ["llama-tied", "qwen3-untied"],
    "cp2": ["qwen3-untied"],
    "ep2": ["qwen3-moe"],
    "pp2-vpp2-ep2": ["qwen3-moe"],
}
AGAIN = {"algo.epochs": 2, "algo.kl.measure_every": 1}
PARTS = {"trainer.batch_parts": 2, "algo.mini_batches": 1}


def of_run(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a variant as settings of the run: those of the trainer, and with a leading dot others."""
    return {name[1:] if name.startswith(".") else f"trainer.{name}": value for name, value in changes.items()}


def run(folder: Path, layout: str, variants: dict[str, Variants], **algo: Any) -> dict[str, dict[str, dict[str, int]]]:
    """Train a model of each name with all of its variants. Returns what ran in backward, per model and variant."""
    for model in variants:
        config = prepare(folder / model, model, layout, variants[model], algo)
    folders = [folder / model for model in variants]
    counts = run_ranks("updates:variants", folders, world=config.trainer.world_size)[0]
    return dict(zip(variants, counts, strict=True))


def prepare(folder: Path, model: str, layout: str, variants: Variants, algo: dict[str, Any]) -> Config:
    """Write a model, a batch and the settings; routers replay random experts if there are some."""
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    write_random_model(folder / "model", **{**sizes, "tied": False, "seed": 1, "dtype": "float32", **MODELS[model]})
    hf = json.loads((folder / "model" / "config.json").read_text())
    shape = routing_shape(hf)
    groups = foreign(shape) if shape else drawn_groups(seed=3)
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(groups))
    values = tiny_values(**{"routing_replay.kind": "R3" if shape else "none", "algo.mini_batches": 2, **algo})
    values["trainer"].update({"micro_batch_tokens": UNEVEN, **LAYOUTS[layout]})
    config = load(values)
    for changes in variants.values():
        check_model(load(changed(config.model_dump(), of_run(changes))), hf)
    (folder / "variants.json").write_text(json.dumps(variants))
    (folder / "config.json").write_text(config.model_dump_json())
    return config


def check_recomputation(folder: Path, layout: str) -> None:
    """Check that every kind of recomputation in a layout trains the same bits."""
    variants = {model: RECOMPUTE[model] for model in RECOMPUTED[layout]}
    if "pp2-vpp2" not in layout:
        variants = {model: {**found, **TWO_LAYERS} for model, found in variants.items()}
    for counts in run(folder, layout, variants).values():
        assert min(count["attention"] for count in counts.values()) > 0, counts
        assert counts["block"]["attention"] <= counts["uniform"]["attention"]


def check_overlap(folder: Path, layout: str, models: Iterable[str], **algo: Any) -> None:
    """Check that communication beside computation in a layout trains the same bits."""
    for counts in run(folder, layout, dict.fromkeys(models, OVERLAP), **UNCLIPPED, **algo).values():
        assert min(count["reductions"] for count in counts.values()) > 0, counts


def check_offload(
    folder: Path, dtype: str, replicas: int, experts: bool, function: str = "offload:moved", **further: Any
) -> None:
    """Check that a trainer whose storages leave the device between two updates trains the same bits."""
    family = "qwen3_moe" if experts else "llama"
    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
    write_random_model(folder / "model", family, vocab=VOCAB, tied=True, seed=1, dtype=dtype, **sizes)
    config = tiny_config(**{**further, "trainer.dtype": dtype, "trainer.data_parallel": replicas})
    for found in run_ranks(function, config.trainer, folder / "model", world=replicas):
        assert found["restored"]
        for update in found["updates"]:
            assert update["published"]
            assert update["saved"]
            assert update["nothing"] == 0
            assert update["everything"] > 2.5 * update["weights_alone"]
            assert update["weights_alone"] >= found["parameters"]
            assert update["weights_alone"] < 1.2 * found["parameters"]  # a buffer is padded
