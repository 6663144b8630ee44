"""Engines that divide experts, replicate attention, or have pipeline stages serve what is published to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from asyncrl.models.tiny import write_random_model
from tests.integration.fleet import (
    EVERY_WAY,
    LOADER,
    PROMPT,
    Engines,
    answers_across_publishes,
    ask,
    engines,
    logprobs,
    reloaded,
    settings,
)
from tests.integration.publisher import SeededWeights, make, publish

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
PAUSES = {"replicas": ("in_place", "retract", "abort"), "stages": ("abort",)}


@contextmanager
def shaped(shape: str, folder: Path) -> Iterator[Engines]:
    """Start an engine of this shape."""
    model = folder / "model"
    write_random_model(model, **SPARSE)  # type: ignore[arg-type]
    with engines(
        folder,
        f"model.path={model}",
        "engine.count=1",
        "engine.dtype=float32",
        *LOADER,
        *SHAPES[shape],
    ) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ("experts", ("tensor", "distributed")),
        *(pytest.param(shape, EVERY_WAY, marks=pytest.mark.campaign) for shape in SHAPES),
    ],
)
def test_an_engine_of_any_shape_serves_what_was_sent(shape: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Checked by the checksums of every rank at every publish, and by the log-probabilities of the output."""
    with shaped(shape, tmp_path) as fleet:
        model = fleet.addresses.model
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
            publisher.fleet.close()


@pytest.mark.campaign
@pytest.mark.parametrize("shape", PAUSES)
def test_answers_in_flight_match_the_versions_they_name(shape: str, tmp_path: Path) -> None:
    """With `in_place`, those of the first version: later tokens read the cache of the versions before."""
    with shaped(shape, tmp_path) as fleet:
        weights = SeededWeights(fleet.addresses.model)
        for number, mode in enumerate(PAUSES[shape]):
            config = settings(fleet.config, transport="tensor", pause_mode=mode, verify_every=1)
            publisher = make(config, fleet.addresses, weights, tmp_path)
            serving, answers = answers_across_publishes(
                publisher, fleet, 1000 * (number + 1), lambda _, found: len(found.versions) >= 2
            )
            publisher.fleet.close()
            known = {
                version: reloaded(fleet.addresses.model, weights.at(version), tmp_path / f"{mode}-{version}")
                for version in range(serving, serving + 6)
            }
            for found in answers:
                for span in found.versions[:1] if mode == "in_place" else found.versions:
                    if mode == "in_place" and span.version > serving:
                        continue  # a request on the wire at a pause may find the prompt in the cache of older weights
                    expected = logprobs(known[span.version], found.token_ids)[span.start : span.end]
                    served = torch.tensor(found.logprobs[span.start : span.end])
                    torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize("shape", ["replicas", "stages"])
def test_flush_is_refused_while_any_part_has_a_request(shape: str, tmp_path: Path) -> None:
    with shaped(shape, tmp_path) as fleet, httpx.Client(**fleet.addresses.access.http, timeout=60) as http:
        (url,) = fleet.addresses.engines
        for replica in range(fleet.config.engine.data_parallel):
            flushes(http, url)
            with http.stream("POST", f"{url}/generate", json=long_request(replica, fleet)) as response:
                chunks = response.iter_lines()
                next(chunks)
                if shape == "replicas":  # the stages do not pause
                    http.post(f"{url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
                assert [http.post(f"{url}/flush_cache").status_code for _ in range(3)] == [400] * 3
                http.post(f"{url}/continue_generation", json={}).raise_for_status()
                assert [line for line in chunks if line][-1] == "data: [DONE]"
            flushes(http, url)


def flushes(http: httpx.Client, url: str) -> None:
    """Wait until an engine flushes its cache: requests that ended or were checks of its health are cleaned up first."""
    deadline = time.monotonic() + 60
    while http.post(f"{url}/flush_cache").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def long_request(replica: int, fleet: Engines) -> dict[str, Any]:
    """Return a request of as many tokens as the model can write."""
    return {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 480, "ignore_eos": True},
        "stream": True,
        **({"routed_dp_rank": replica} if fleet.config.engine.data_parallel > 1 else {}),
    }
