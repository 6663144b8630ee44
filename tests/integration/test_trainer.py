"""Tests of real Megatron on CPU without engines: the update is a function of the batch, whatever the layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.updates import LAYOUTS, MODELS, Outcome, drawn_groups, launch, write_models

pytestmark = pytest.mark.integration

DENSE = ["llama-tied", "qwen3-untied"]
WITHOUT_EXPERTS = [name for name, settings in LAYOUTS.items() if not any("expert" in field for field in settings)]
CASES = [
    *((layout, model) for model in DENSE for layout in WITHOUT_EXPERTS if layout != "single"),
    *((layout, "qwen3-moe") for layout in LAYOUTS if layout not in ("single", "unshared", "tp2", "tp2-pp2")),
    *((layout, model) for model in ("glm4-moe", "deepseek") for layout in ("tp2-sp-ep2", "pp2-vpp2-ep2")),
]  # Megatron trains experts under tensor parallelism with sequence parallelism only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("layouts"))


@cache
def _updated(folder: Path, layout: str) -> dict[str, Outcome]:
    """Return the outcome of every model that has a case in this layout, from one launch."""
    models = list(MODELS) if layout == "single" else [model for name, model in CASES if name == layout]
    return launch(folder, layout, models, LAYOUTS[layout])


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_loss_gradient_and_weights_ignore_the_layout(folder: Path, layout: str, model: str) -> None:
    figures, weights = _updated(folder, layout)[model]
    reference, reference_weights = _updated(folder, "single")[model]
    for mine, theirs in zip(figures, reference, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "logprob_gap/mean",
            "logprob_gap/max",
            "tokens/trained",
            "correction/capped",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (
                name
            )  # TP sums in another order: 1e-5 here
    assert weights.keys() == reference_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, reference_weights[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_every_weight_is_trained(folder: Path) -> None:
    """Otherwise, agreement between layouts would mean little."""
    for model, (_, weights) in _updated(folder, "single").items():
        start = load_file(folder / model / "model" / "model.safetensors")
        same = [name for name, tensor in weights.items() if tensor.equal(start[name])]
        assert all(name.endswith("e_score_correction_bias") for name in same), same


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama-tied", {}), ("glm4-moe", {**LAYOUTS["pp2-vpp2-ep2"], "dtype": "bfloat16"})],
    ids=["one-rank", "bfloat16-experts"],
)
def test_bad_step_leaves_weights_and_schedule(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """The router's bias stays float32 in bfloat16 training, bit for bit."""
    bad = {"bad_grad_norm": 1e-9, "on_bad_step": "skip"}
    figures, weights = launch(folder, "bad", [model], {**settings, **bad})[model]
    assert [step["step/bad"] for step in figures] == [1.0, 1.0]
    assert figures[0]["grad_norm"] == figures[1]["grad_norm"] > 1e-9
    start = load_file(folder / model / "model" / "model.safetensors")
    assert weights.keys() == start.keys()
    for name, tensor in start.items():
        kept = "dtype" not in settings or name.endswith("e_score_correction_bias")
        torch.testing.assert_close(weights[name], tensor if kept else tensor.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers_and_plain_autograd(folder: Path, name: str) -> None:
    """The reference is an independent implementation: HF's model, one sequence at a time, with the formula written
    out."""
    from transformers import AutoModelForCausalLM

    from asyncrl.algo.advantage import grpo
    from asyncrl.algo.samples import build_samples, shares
    from asyncrl.algo.table import build_table

    model = AutoModelForCausalLM.from_pretrained(folder / name / "model", dtype=torch.float32)
    table, samples = build_table(drawn_groups(3), 0), [s for g in build_samples(drawn_groups(3)) for s in g]
    advantages, weights = grpo(table), shares(table, samples, "token", 3)
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.8
        every = torch.log_softmax(logits, -1)
        chosen = every.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        mask = torch.tensor(sample.mask)
        rows = slice(sample.first_row, sample.first_row + sample.num_trained)
        weight = (chosen.detach()[mask] - table.behaviour[rows]).exp().clamp(max=2.0)
        entropy = -(every.exp() * every).sum(-1)[mask]
        ratio = (chosen - chosen.detach()).exp()[mask]
        loss = loss + (weights[rows] * (-weight * ratio * advantages[rows] - 0.01 * entropy)).sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    first = _updated(folder, "single")[name][0][0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    transformers_loads_the_export = AutoModelForCausalLM.from_pretrained(
        folder / name / "out-single", dtype=torch.float32
    )
    assert transformers_loads_the_export.config.architectures == model.config.architectures
