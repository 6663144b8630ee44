"""Tests of speculative decoding with n-grams on a real engine: its tokens, their log-probabilities and their versions
are the model's."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.fleet import Engines, engines

PROMPT = [12, 1, 2, 3, 11]
"""The tiny model's <bos>123=."""
LENGTH = 3
SAMPLES = 4000
SHARP = 0.1
"""Temperature at which some 120 of the 4,096 answers of three tokens have four fifths of the probability."""
GAP = 1e-4
"""Largest difference of a log-probability in float32 between a step that verifies drafts and a prefill."""


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start an engine that verifies drafts of five tokens."""
    overrides = ("engine.speculative=ngram", "engine.draft_tokens=6", "engine.stream_interval=1")
    with engines(tmp_path_factory.mktemp("speculation"), *overrides) as started:
        yield started


def post(started: Engines, path: str, **body: Any) -> Any:
    url = started.addresses.engines[0]
    response = httpx.post(f"{url}{path}", json=body, timeout=120.0, **started.addresses.access.http)
    assert response.status_code == 200, response.text
    return response.json()


def generate(
    started: Engines, prompt: list[int], tokens: int, n: int = 1, temperature: float = 1.0, **fields: Any
) -> list[dict[str, Any]]:
    sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True, "n": n}
    found = post(started, "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True, **fields)
    return found if isinstance(found, list) else [found]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.integration
def test_log_probabilities_are_those_of_a_prefill(speculative: Engines) -> None:
    accepted = 0
    for answer in generate(speculative, PROMPT, 40, n=16):
        tokens, given = answer["output_ids"], logprobs_of(answer)
        assert len(tokens) == len(given) == 40
        meta = answer["meta_info"]
        accepted += meta["spec_num_correct_drafts"]
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
        (read,) = generate(speculative, [*PROMPT, *tokens], 1, logprob_start_len=0, extra_key="another cache")
        forced = [logprob for logprob, _, _ in read["meta_info"]["input_token_logprobs"]][len(PROMPT) :]
        assert max(abs(one - other) for one, other in zip(given, forced, strict=True)) < GAP
    assert accepted > 16, "no test of drafts: hardly any was accepted"


@pytest.mark.integration
def test_answers_have_the_distribution_of_the_model(speculative: Engines) -> None:
    """A chi-square test of whole answers, whose probabilities are the product of those that the engine reports."""
    counts: Counter[tuple[int, ...]] = Counter()
    probability: dict[tuple[int, ...], float] = {}
    accepted = 0
    for _ in range(SAMPLES // 500):
        for answer in generate(speculative, PROMPT, LENGTH, n=500, temperature=SHARP):
            key = tuple(answer["output_ids"])
            counts[key] += 1
            probability[key] = math.exp(sum(logprobs_of(answer)))
            accepted += answer["meta_info"].get("spec_num_correct_drafts", 0)
    assert accepted > SAMPLES / 4
    expected = {key: p * SAMPLES for key, p in probability.items() if p * SAMPLES >= 5}
    rest = SAMPLES - sum(expected.values())
    square = sum((counts[key] - count) ** 2 / count for key, count in expected.items())
    square += (SAMPLES - sum(counts[key] for key in expected) - rest) ** 2 / rest
    print(f"chi-square {square:.1f} at {len(expected)} degrees of freedom, {accepted} drafts accepted")
    assert len(expected) > 50
    assert square < len(expected) + 5 * math.sqrt(2 * len(expected))


@pytest.mark.integration
def test_tokens_have_the_version_that_generated_them(speculative: Engines) -> None:
    """Tokens that arrive before a pause have the old version, all later ones the new one, to the token."""
    tokens, samples = 50, 128
    url, http = speculative.addresses.engines[0], speculative.addresses.access.http
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "n": samples}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "return_logprob": True}

    async def main() -> bool:
        """Return whether the pause fell into the answers."""
        received: Counter[int] = Counter()
        versions: dict[int, Any] = {}
        under_way = asyncio.Event()
        async with httpx.AsyncClient(base_url=url, timeout=300.0, **http) as client:
            await client.post("/update_weight_version", json={"new_version": "0", "abort_all_requests": False})

            async def read() -> None:
                async with client.stream("POST", "/generate", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line.removeprefix("data: "))
                            received[event["index"]] += len(event["output_ids"])
                            if received.total() > samples * tokens / 4:
                                under_way.set()
                            if event["meta_info"]["finish_reason"]:
                                versions[event["index"]] = event["meta_info"]["weight_versions"]

            reading = asyncio.create_task(read())
            await under_way.wait()
            await client.post("/pause_generation", json={"mode": "in_place"})
            before: Counter[int] = Counter()
            while before != received:  # what was generated arrives
                before = Counter(received)
                await asyncio.sleep(3.0)
            await client.post("/update_weight_version", json={"new_version": "1", "abort_all_requests": False})
            await client.post("/continue_generation", json={})
            await reading
        for index, spans in versions.items():
            parts = [("0", 0, before[index]), ("1", before[index], tokens)]
            expected = [{"version": v, "start": start, "end": end} for v, start, end in parts if end > start]
            assert spans == expected
        assert received == Counter(dict.fromkeys(range(samples), tokens))
        return before.total() < samples * tokens

    assert any(asyncio.run(main()) for _ in range(5)), "the pauses fell outside the answers"
