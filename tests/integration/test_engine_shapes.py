"""Engines that divide experts, replicate attention, or have pipeline stages serve what is published to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from asyncrl.models.tiny import write_random_model
from tests.integration.fleet import engines
from tests.integration.publisher import SeededWeights, make, publish
from tests.integration.test_weights import PROMPT, ask, settings

pytestmark = pytest.mark.integration

SPARSE = {
    "arch": "qwen3_moe",
    "vocab": 16,
    "hidden": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 48,
    "tied": False,
    "seed": 1,
    "dtype": "float32",
    "spread": 0.15,
    "fields": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
SHAPES = {
    "experts": ("engine.tensor_parallel=2", "engine.expert_parallel=2"),
    "replicas": ("engine.tensor_parallel=2", "engine.data_parallel=2", "engine.expert_parallel=2"),
    "all": (
        *("engine.tensor_parallel=2", "engine.data_parallel=2", "engine.expert_parallel=2"),
        *("engine.pipeline_parallel=2", "weights.pause_mode=abort"),
    ),
    "stages": ("engine.pipeline_parallel=2", "weights.pause_mode=abort"),
}
EVERY_WAY = ("tensor", "distributed", "disk", "delta")


def reloaded(model: Path, tensors: dict[str, torch.Tensor], folder: Path) -> torch.nn.Module:
    """Return a model with these tensors, whose experts transformers stacks as it loads them."""
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs(model: torch.nn.Module, answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities of an answer's tokens, computed by transformers."""
    with torch.no_grad():
        every = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ("experts", ("tensor", "distributed")),
        *(pytest.param(shape, EVERY_WAY, marks=pytest.mark.campaign) for shape in SHAPES),
    ],
)
def test_an_engine_of_any_shape_serves_what_was_sent(shape: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Checked by the checksums of every rank at every publish, and by the log-probabilities of the output."""
    model = tmp_path / "model"
    write_random_model(model, **SPARSE)  # type: ignore[arg-type]
    started = (
        f"model.path={model}",
        "engine.count=1",
        "engine.dtype=float32",
        "weights.transport=delta",
        *SHAPES[shape],
    )
    with engines(tmp_path, *started) as fleet:
        weights = SeededWeights(fleet.addresses.model, share=0.05)
        for first, transport in enumerate(ways):
            config = settings(fleet.config, transport=transport, verify_every=1)
            publisher = make(config, fleet.addresses, weights, tmp_path / transport)
            for version in (2 * first + 1, 2 * first + 2):
                assert publish(publisher, version)["engines"] == 1
            served = reloaded(model, weights.at(version), tmp_path / f"v{version}")
            for found in ask(fleet, 6, version, run=f"s-{transport}", replicas=fleet.config.engine.data_parallel):
                assert {span.version for span in found.versions} == {version}
                expected = logprobs(served, found.token_ids)
                torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-4)
            publisher._fleet.close()
