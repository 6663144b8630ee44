"""Recomputing activations changes no bit of an update, in any layout, and routers replay the same experts again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import load
from asyncrl.launch.checks import check_model
from asyncrl.models.architectures import routing_shape
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.test_routing import foreign
from tests.integration.test_trainer import LAYOUTS, MODELS, UNEVEN, VOCAB, drawn_groups

pytestmark = pytest.mark.integration

FULL: dict[str, dict[str, Any]] = {
    "uniform": {"granularity": "full"},
    "block": {"granularity": "full", "method": "block"},
}
DENSE = {"granularity": "selective", "modules": ["core_attn", "layernorm", "mlp"]}
SPARSE = {"granularity": "selective", "modules": ["core_attn", "layernorm", "mlp", "moe"]}
LATENT = {"granularity": "selective", "modules": ["core_attn", "mla_up_proj", "layernorm", "shared_experts"]}
SETTINGS = {
    "qwen3-untied": {**FULL, "two layers": {"granularity": "full", "num_layers": 2}, "selective": DENSE},
    "qwen3-moe": {**FULL, "selective": SPARSE},
    "deepseek": {**FULL, "selective": LATENT},
}
CASES = {
    "single": ["qwen3-untied", "deepseek"],
    "tp2-sp": ["qwen3-untied"],
    "pp2": ["qwen3-untied", "deepseek"],
    "pp2-vpp2": ["qwen3-moe"],
    "cp2": ["qwen3-untied"],
    "ep2": ["qwen3-moe"],
    "tp2-sp-ep2": ["qwen3-moe", "deepseek"],
}


def prepare(folder: Path, model: str, layout: str) -> None:
    """Write a model, a batch and the settings; routers replay random experts if there are some."""
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    write_random_model(folder / "model", **{**sizes, "tied": False, "seed": 1, "dtype": "float32", **MODELS[model]})
    hf = json.loads((folder / "model" / "config.json").read_text())
    shape = routing_shape(hf)
    groups = foreign(shape) if shape else drawn_groups(seed=3)
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(groups))
    values = tiny_values(**{"algo.routing_replay": "R3" if shape else "none", "algo.mini_batches": 2})
    values["trainer"].update({"micro_batch_tokens": UNEVEN, **LAYOUTS[layout]})
    config = load(values)
    settings = dict(SETTINGS[model])
    chunk = hf["num_hidden_layers"] // config.trainer.pipeline_parallel // config.trainer.virtual_pipeline
    if chunk < 2:
        settings.pop("two layers", None)
    for recompute in settings.values():
        whole = {**values["trainer"]["recompute"], **recompute}
        check_model(load({**values, "trainer": {**values["trainer"], "recompute": whole}}), hf)
    (folder / "recompute.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(config.model_dump_json())


@pytest.mark.parametrize("layout", CASES)
def test_recomputation_changes_no_bit_of_figures_gradients_and_weights(layout: str, tmp_path: Path) -> None:
    folders = [tmp_path / model for model in CASES[layout]]
    for folder in folders:
        folder.mkdir()
        prepare(folder, folder.name, layout)
    trainer = load(json.loads((folders[0] / "config.json").read_text())).trainer
    run_ranks("rank_recompute.py", *(str(folder) for folder in folders), world=trainer.world_size)
    for folder in folders:
        counts = json.loads((folder / "counts.json").read_text())
        assert min(counts.values()) > 0, counts
        assert counts["block"] <= counts["uniform"]
