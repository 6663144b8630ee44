"""Tests of versions that are adapters, on real engines behind the real router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engine.adapters import adapter_names
from asyncrl.engine.client import GenerationClient
from asyncrl.schema import Completion
from tests.integration.adapters import SETTINGS, SeededAdapters, make, publish
from tests.integration.fleet import Engines, engines

pytestmark = pytest.mark.integration

PROMPT, EOS = [12, 1, 2, 3, 11], 10
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def one_fleet_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start two engines that serve adapters behind the router."""
    with engines(tmp_path_factory.mktemp("adapters"), "engine.count=2", *SETTINGS) as started:
        yield started


@pytest.fixture
def fleet(one_fleet_with_adapters: Engines) -> Engines:
    """Return both engines, restarting any that the last test killed."""
    one_fleet_with_adapters.revive()
    return one_fleet_with_adapters


def weights_of(fleet: Engines) -> SeededAdapters:
    return SeededAdapters(fleet.addresses.model, fleet.config.trainer.lora.rank or 0, TARGETS)


def client(fleet: Engines, run: str, **changes: object) -> GenerationClient:
    values = {
        "run": run,
        "access": fleet.addresses.access,
        "max_new_tokens": 48,
        "temperature": 1.0,
        "stop_token_ids": [EOS],
        "timeout": 60.0,
        "retry_timeout": 30.0,
        "coalesce": False,
        "names": adapter_names(fleet.config, run),
    }
    return GenerationClient(fleet.addresses.router, **{**values, **changes})  # type: ignore[arg-type]


def gap(fleet: Engines, weights: SeededAdapters, version: int, found: Completion) -> float:
    """Return the largest difference of a completion's log-probabilities from those of transformers with the merged
    weights of a version."""
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=torch.float32)
    model.load_state_dict(weights.merged(version, fleet.config.trainer.lora.scale), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + found.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    every = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    return (every - torch.tensor(found.logprobs)).abs().max().item()


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engines_compute_what_the_merged_weights_compute(fleet: Engines, tmp_path: Path, transport: str) -> None:
    weights, run = weights_of(fleet), f"equal-{transport}"
    of = fleet.config.weights.model_copy(update={"transport": transport})
    config = fleet.config.model_copy(update={"weights": of})
    made = client(fleet, run)
    publisher = make(config, fleet.addresses, weights, tmp_path, run=run, announce=lambda version: [0, 1, 2])

    async def ask(version: int) -> list[Completion]:
        made.inflight.release(version)
        return list(await asyncio.gather(*[made.generate()(PROMPT) for _ in range(4)]))

    async def all_versions() -> list[list[Completion]]:
        found = [await ask(0)]
        for version in (1, 2):
            publish(publisher, weights, version)
            found.append(await ask(version))
        await made.close()
        return found

    for version, completions in enumerate(asyncio.run(all_versions())):
        assert {span.version for one in completions for span in one.versions} == {version}
        assert max(gap(fleet, weights, version, one) for one in completions) < 1e-4
        assert max(gap(fleet, weights, (version + 1) % 3, one) for one in completions) > 1e-2
