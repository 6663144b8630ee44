"""Megatron's logits and gradients equal those of transformers for every model family, on one rank and in parallel."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.extensions.vision import tiny as tiny_vision
from asyncrl.models import tiny
from asyncrl.models.families import choosing_biases, known_families, of_type
from asyncrl.models.tiny import write_random_model
from asyncrl.weights.folder import HFFolder
from tests.integration.families import (
    CASES,
    CHOOSING,
    PUBLISHED_AS,
    SCALED,
    TEXT,
    check,
    exported,
    launch,
    unscale_windows,
    written,
)
from tests.integration.fleet import ask, engines, logprobs, reloaded, settings
from tests.integration.publisher import SeededWeights, make, publish
from tests.integration.running import run
from tests.weights.models import as_published

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all models with transformers."""
    return written(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        launch(folder, layout, {})

    return run


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_and_gradients_are_those_of_transformers(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    check(folder, layout, name)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_transformers_loads_the_export_as_the_same_model(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    export = folder / f"{layout}-{name}"
    with HFFolder(folder / name) as given, HFFolder(export) as found:
        assert sorted(found.names()) == sorted(given.names())
        assert found.digest() == given.digest()
    if name not in PUBLISHED_AS:
        _, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
        assert not any(report.values()), report


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[1] in CHOOSING])
def test_choosing_biases_stay_bit_for_bit(layout: str, name: str, folder: Path, megatron: Any) -> None:
    megatron(layout)
    found = exported(folder, layout, name)
    given = {
        key: tensor
        for key, tensor in load_file(folder / name / "model.safetensors").items()
        if key.endswith(choosing_biases())
    }
    assert given
    for key, tensor in given.items():
        assert found[key].dtype == torch.float32
        assert found[key].equal(tensor), key
        assert not tensor.bfloat16().float().equal(tensor)  # the cast would show


PADDED = {"n_shared_experts", "num_shared_experts"}
"""Fields of models for whose shared experts no padding is known."""
RUN = (
    *("run.max_steps=2", "rollout.batch_groups=4", "rollout.group_size=4", "eval.questions=0"),
    *("rollout.max_staleness=0", "rollout.lead=null", "weights.verify_every=1"),
)


@pytest.mark.parametrize("kind", [family.model_type for family in known_families().values() if family.serving.on_cpu])
def test_two_steps_of_a_run_are_trained_published_and_answered(kind: str, tmp_path: Path) -> None:
    """With adapters where the family has them. Every publish is verified, and engines and trainer agree."""
    family, model = of_type(kind), tmp_path / "model"
    experiment = "tiny_vision" if family.tower else "tiny"
    if family.tower:
        tiny_vision.write(model, kind, spread=0.15)
        as_published(model, kind)
    else:
        tiny.write(tmp_path / "tiny")
        shutil.copytree(tmp_path / "tiny", model, ignore=shutil.ignore_patterns("*.safetensors"))
        write_served(model, kind)
    adapters = ["trainer.lora.rank=4"] if family.adapters else []
    steps = run(tmp_path / "run", *RUN, f"model.path={model}", *adapters, experiment=experiment)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["logprob_gap/max"] < 1e-4 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert steps[-1]["time/verify"] > 0


def write_served(model: Path, kind: str, fields: dict[str, Any] | None = None) -> None:
    """Write a model of the sizes that engines on CPUs serve."""
    ends = tuple(tiny.TOKENS.index(one) for one in (tiny.BOS, tiny.EOS, tiny.PAD))
    padded = PADDED & of_type(kind).tiny.keys()
    sizes: dict[str, Any] = {"vocab": 16, "hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 96}
    fields = {**({"moe_intermediate_size": 32} if padded else {}), **(fields or {})}
    more: dict[str, Any] = {"spread": 0.15, "fields": fields, "bos_eos_pad": ends, "max_positions": tiny.MAX_POSITIONS}
    write_random_model(model, kind, **sizes, tied=False, seed=1, dtype="float32", **more)


SERVED = [family.model_type for family in TEXT if family.serving.on_cpu]


@pytest.mark.parametrize("kind", SERVED)
def test_engines_compute_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    """Every publish is verified by the checksums of all parameters."""
    model = tmp_path / "model"
    write_served(model, kind)
    with engines(tmp_path, f"model.path={model}", "engine.count=1", "engine.dtype=float32") as fleet:
        weights = SeededWeights(model, share=0.05)
        config = settings(fleet.config, transport="tensor", verify_every=1)
        publisher = make(config, fleet.addresses, weights, tmp_path / "publish")
        for version in (0, 1):
            assert publish(publisher, version)["engines"] == 1
            served = reloaded(model, weights.at(version), tmp_path / f"v{version}")
            for found in ask(fleet, 4, version):
                expected = logprobs(served, found.token_ids)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-5)
        publisher.fleet.close()


def test_engine_scales_positions_where_the_trainer_does(tmp_path: Path) -> None:
    """Those of OLMo-3 without windows. config.json has the spelling of its publisher, which alone SGLang reads."""
    model = tmp_path / "model"
    write_served(model, "olmo3", {"rope_parameters": SCALED})
    hf = json.loads((model / "config.json").read_text())
    scaling = hf.pop("rope_parameters")
    hf |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (model / "config.json").write_text(json.dumps(hf))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    unscale_windows(expected)
    with engines(tmp_path, f"model.path={model}", "engine.count=1", "engine.dtype=float32") as fleet:
        for found in ask(fleet, 4, 0):
            wanted = logprobs(expected, found.token_ids)
            torch.testing.assert_close(torch.tensor(found.logprobs), wanted, rtol=0, atol=1e-5)
