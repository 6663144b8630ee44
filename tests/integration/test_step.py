"""Successive updates equal those of torch's AdamW and clipping on transformers' model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks
from tests.integration.updates import TIED, VOCAB, drawn_samples, token_weights

pytestmark = pytest.mark.integration

CLIP = 0.001
TRAINER = tiny_config(**{"trainer.optimizer.clip_grad": CLIP, "trainer.optimizer.lr": 1e-3}).trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models."""
    made = tmp_path_factory.mktemp("step")
    sizes: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
    for name, tied in TIED.items():
        write_random_model(made / name, "llama", vocab=VOCAB, tied=tied, seed=1, dtype="float32", **sizes)
    return made


@cache
def trained(folder: Path) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return gradient norms and weights of Megatron by model."""
    models = [folder / name for name in TIED]
    return dict(zip(TIED, run_ranks("updates:clipped", TRAINER, models, world=1)[0], strict=True))


@pytest.mark.parametrize("name", TIED)
def test_clipped_updates_are_those_of_transformers_and_torch(folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    found_norms, found = trained(folder)[name]
    settings = TRAINER.optimizer
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    norms = []
    for _ in range(3):
        adamw.zero_grad()
        for one in (one for group in drawn_samples() for one in group):
            every = torch.log_softmax(model(torch.tensor([one.prompt_ids + one.token_ids])).logits[0], -1)
            own = every[len(one.prompt_ids) - 1 : -1].gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            (-(token_weights()[one.first_row : one.first_row + one.num_trained] * own).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).detach()))
        adamw.step()
    assert min(norms) > 10 * CLIP
    torch.testing.assert_close(found_norms, torch.tensor(norms), rtol=1e-5, atol=0)
    expected = dict(model.named_parameters())
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key].detach(), rtol=0, atol=2e-5, msg=key)
