"""A quantized base on Megatron is the dequantized model, to the bit, and takes the bytes that the planner says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.extensions.plan.activations import Training
from asyncrl.extensions.plan.memory import trainer_rank
from asyncrl.extensions.plan.settings import adapters_of, layout_of
from asyncrl.extensions.plan.shapes import counted, shape_of
from asyncrl.launch.checks.model_files import read_model
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks
from tests.integration.running import run
from tests.integration.updates import VOCAB

pytestmark = pytest.mark.integration

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"fields": {"moe_intermediate_size": 64}},
}
TWO = {"trainer.tensor_parallel": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({}, list(MODELS)),
    "tp2": ({**TWO, "trainer.dtype": "bfloat16", "trainer.lora.base": "int8"}, ["qwen3"]),
    "sp2": ({**TWO, "trainer.sequence_parallel": True, "trainer.expert_tensor_parallel": 1}, list(MODELS)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_base_computes_as_the_dequantized_model(layout: str, tmp_path: Path) -> None:
    """Shards have the codes of whole weights, which are quantized here."""
    changes, models = LAYOUTS[layout]
    trainer = tiny_config(
        **{"trainer.dtype": "float32", "trainer.lora.rank": 4, "trainer.lora.base": "nf4", **changes}
    ).trainer
    sizes = {"vocab": VOCAB, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256}
    for seed, name in enumerate(models):
        write_random_model(
            tmp_path / name, name, **sizes, **MODELS[name], tied=False, seed=seed, dtype="bfloat16", max_positions=64
        )
        (tmp_path / name / "tokenizer.json").write_text("{}")
    told = run_ranks("quantized:compared", tmp_path, layout, trainer, models, world=trainer.world_size)
    adapters = adapters_of(trainer.lora)
    assert adapters is not None
    for name in models:
        found = load_file(tmp_path / f"{layout}-{name}" / "model.safetensors")
        (file,) = (tmp_path / f"{layout}-{name}-run" / "base").glob("*.safetensors")
        stored = load_file(file)
        shape = shape_of(json.loads((tmp_path / name / "config.json").read_text()))
        files = counted(read_model(tmp_path / name, "model.path").weights.items(), shape)
        _, packed = adapters.split(files)
        quantized = {one.name for one in packed}
        assert len(quantized) > 0
        for key, weight in load_file(tmp_path / name / "model.safetensors").items():
            weight = weight.to(getattr(torch, trainer.dtype))
            if key in quantized:
                codes, scales, weight = packed_of(weight, trainer.lora.base)
                assert torch.equal(stored.pop(f"{key}.codes"), codes)
                assert torch.equal(stored.pop(f"{key}.scales"), scales)
            assert torch.equal(found[key], weight), key
        assert not stored
        planned = trainer_rank(files, shape, layout_of(trainer), Training(trainer.dtype, 1, 1, adapters=adapters))
        assert max(rank[name] for rank in told) == planned["frozen base"]


def packed_of(weight: torch.Tensor, base: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes and scales of a whole weight, and the weight that they stand for."""
    from asyncrl.platforms import here

    here().prepare_trainer()
    from asyncrl.extensions.qlora.packed import quantize

    packed = quantize(weight, base)
    return packed.codes, packed.scales, packed.dequantized()


SMALL = [
    *("run.max_steps=2", "eval.questions=0", "rollout.batch_groups=4", "rollout.group_size=4"),
    *("rollout.max_staleness=0", "weights.verify_every=1", "trainer.lora.rank=4", "trainer.lora.base=nf4"),
]


def test_engines_serve_the_dequantized_base_from_the_start(tmp_path: Path) -> None:
    """The gap between the log-probabilities of trainer and engine is that of float32, in every step: of a run with
    merged weights, and of one that starts from its adapter (trainer.lora.path) and publishes adapters."""
    first = run(tmp_path / "first", *SMALL, "weights.lora=merged", "trainer.optimizer.lr=1e-2")
    start_from = f"trainer.lora.path={tmp_path / 'first' / 'hf'}"
    second = run(tmp_path / "second", *SMALL, "weights.lora=versions", start_from, "trainer.optimizer.lr=1e-30")
    assert max(step["logprob_gap/max"] for step in (*first, *second)) < 1e-4
    mine, theirs = (load_file(tmp_path / name / "hf" / "adapter_model.safetensors") for name in ("first", "second"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(mine[name].abs().max() > 1e-3 for name in mine if "lora_B" in name), "the first run changed nothing"


@pytest.mark.campaign  # test_resume.py resumes runs; this one must not quantize again
def test_a_run_that_resumes_keeps_the_quantized_base(tmp_path: Path) -> None:
    kept = [*SMALL, "weights.lora=merged", "checkpoint.every=1"]
    run(tmp_path / "run", *kept)
    written = (tmp_path / "run" / "base" / "base.json").stat().st_mtime_ns
    steps = run(tmp_path / "run", *kept, "resume=auto", "run.max_steps=3")
    assert steps[-1]["logprob_gap/max"] < 1e-4
    assert (tmp_path / "run" / "base" / "base.json").stat().st_mtime_ns == written
