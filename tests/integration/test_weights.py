"""Weights on real engines: every transport, staging and pause mode; what is served is what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.engine.client import Client
from asyncrl.types import Completion
from tests.integration.fleet import Engines, engines
from tests.integration.publisher import SeededWeights, make, publish

pytestmark = pytest.mark.integration

PROMPT, EOS = [12, 1, 2, 3, 11], 10
WAYS = [
    ("tensor", "full", "in_place"),
    ("tensor", "stream", "retract"),
    ("distributed", "full", "in_place"),
    ("distributed", "stream", "abort"),
    ("disk", "full", "in_place"),
    ("delta", "full", "in_place"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """An engine of one rank and one of two behind the router."""
    folder = tmp_path_factory.mktemp("weights")
    with engines(folder, "engine.tensor_parallel=2", "engine.count=2", "weights.transport=delta") as started:
        yield started


def settings(config: Config, **weights: object) -> Config:
    return config.model_copy(update={"weights": config.weights.model_copy(update={"timeout": 30.0, **weights})})


def client(fleet: Engines, publisher_hold: bool = False, **changes: object) -> Client:
    values = {
        "run": "w",
        "api_key": fleet.addresses.api_key,
        "max_new_tokens": 48,
        "temperature": 1.0,
        "stop_token_ids": [EOS],
        "timeout": 60.0,
        "coalesce": False,
    }
    return Client(fleet.addresses.router, **{**values, **changes})  # type: ignore[arg-type]


def logprobs(tensors: dict[str, torch.Tensor], fleet: Engines, prompt: list[int], found: Completion) -> torch.Tensor:
    """What these weights give a completion's tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        every = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]


def whole(found: Completion) -> None:
    """Nothing is missing: it ended where the model or the limit says, and every token has its log-probability."""
    assert len(found.token_ids) == len(found.logprobs)
    assert len(found.token_ids) == 48 or found.token_ids[-1] == EOS
    assert EOS not in found.token_ids[:-1]
    assert [span.start for span in found.versions[1:]] == [span.end for span in found.versions[:-1]]
    assert (found.versions[0].start, found.versions[-1].end) == (0, len(found.token_ids))
    assert [span.version for span in found.versions] == sorted({span.version for span in found.versions})


def ask(fleet: Engines, count: int, version: int, **changes: object) -> list[Completion]:
    async def answers() -> list[Completion]:
        made = client(fleet, **changes)
        made.release(version)
        generate = made.generate()
        found = await asyncio.gather(*[generate(PROMPT) for _ in range(count)])
        await made.close()
        return found

    return asyncio.run(answers())


@pytest.mark.parametrize(("transport", "staging", "mode"), WAYS, ids=["-".join(way) for way in WAYS])
@pytest.mark.parametrize("bucket", ["one", "each"])
def test_what_is_served_is_what_was_sent(transport, staging, mode, bucket, fleet: Engines, tmp_path: Path) -> None:
    """By the engines' own checksums at every publish, and by the log-probabilities of what they generate."""
    config = settings(fleet.config, transport=transport, staging=staging, pause_mode=mode, verify_every=1)
    weights = SeededWeights(fleet.addresses.model, share=0.05)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    if bucket == "each":
        publisher._settings = Small(publisher._settings)  # type: ignore[assignment]
    for version in (1, 2, 3):
        figures = publish(publisher, version)
        assert figures["engines"] == 2
        assert figures["verify"] > 0
    assert set(publisher._fleet.versions().values()) == {"3"}
    for found in ask(fleet, 4, 3, run=f"w-{transport}-{staging}-{mode}-{bucket}"):
        assert {span.version for span in found.versions} == {3}
        expected = logprobs(weights.at(3), fleet, PROMPT, found)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-4)
    publisher._fleet.close()


def test_request_in_flight_across_five_publishes_tells_truly_which_version_wrote_what(
    fleet: Engines, tmp_path: Path
) -> None:
    """Under `retract` the cache is made anew, so each span's log-probabilities are those of its version's weights."""
    config = settings(fleet.config, transport="tensor", pause_mode="retract")
    weights = SeededWeights(fleet.addresses.model)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    publish(publisher, 10)

    async def with_publishes() -> list[Completion]:
        made = client(fleet, run="five")
        made.release(10)
        generate = made.generate()
        running = asyncio.gather(*[generate(PROMPT) for _ in range(24)])
        for version in range(11, 16):
            await asyncio.sleep(0.02)
            await asyncio.to_thread(publish, publisher, version)
        found = await running
        await made.close()
        return found

    answers = asyncio.run(with_publishes())
    assert max(len(found.versions) for found in answers) >= 3, "the publishes fell outside the answers"
    for found in answers:
        whole(found)
        for span in found.versions:
            expected = logprobs(weights.at(span.version), fleet, PROMPT, found)[span.start : span.end]
            served = torch.tensor(found.logprobs[span.start : span.end])
            torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)
    publisher._fleet.close()


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_request_in_flight_keeps_its_tokens_in_the_other_modes(mode: str, fleet: Engines, tmp_path: Path) -> None:
    config = settings(fleet.config, transport="tensor", pause_mode=mode)
    weights = SeededWeights(fleet.addresses.model, share=0.01)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    publish(publisher, 20)

    async def with_publishes() -> list[Completion]:
        made = client(fleet, run=f"flight-{mode}")
        made.release(20)
        loop = asyncio.get_running_loop()
        publisher._hold = lambda: loop.call_soon_threadsafe(made.hold) and None
        publisher._announce = lambda version: loop.call_soon_threadsafe(made.release, version) and None
        generate = made.generate()
        running = asyncio.gather(*[generate(PROMPT) for _ in range(24)])
        for version in range(21, 26):
            await asyncio.sleep(0.02)
            await asyncio.to_thread(publish, publisher, version)
        found = await running
        await made.close()
        return found

    answers = asyncio.run(with_publishes())
    assert max(len(found.versions) for found in answers) >= 2, "the publishes fell outside the answers"
    for found in answers:
        whole(found)
        first = found.versions[0]
        expected = logprobs(weights.at(first.version), fleet, PROMPT, found)[: first.end]
        torch.testing.assert_close(torch.tensor(found.logprobs[: first.end]), expected, rtol=0, atol=1e-4)
    publisher._fleet.close()


class Small:
    """The same settings, with a bucket for each tensor."""

    def __init__(self, settings: object) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> object:
        return 0 if name == "bucket_mb" else getattr(self._settings, name)
