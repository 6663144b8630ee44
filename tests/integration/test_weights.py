"""Tests of publishing to real engines with every transport, staging and pause mode: engines serve what was sent."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from asyncrl import lookup
from asyncrl.config import load
from asyncrl.schema import Completion
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.transport import TensorTransport
from tests.integration.fleet import (
    EVERY_WAY,
    LOADED,
    LOADER,
    OF_EXTENSIONS,
    PROMPT,
    Engines,
    answers_across_publishes,
    ask,
    engines,
    publish_under_way,
    settings,
    whole,
)
from tests.integration.publisher import SeededWeights, make, publish, quantized

pytestmark = pytest.mark.integration

WAYS = [
    ("tensor", "full", "in_place"),
    ("tensor", "stream", "retract"),
    ("distributed", "full", "in_place"),
    ("distributed", "stream", "abort"),
    *((name, "full", "in_place") for name in OF_EXTENSIONS),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start two engines of two ranks behind the router, one of them on two machines."""
    folder = tmp_path_factory.mktemp("weights")
    shape = ("engine.tensor_parallel=2", "engine.count=2", *LOADER)
    with engines(folder, *shape, last_spans=True) as started:
        yield started


def logprobs(tensors: dict[str, torch.Tensor], fleet: Engines, prompt: list[int], found: Completion) -> torch.Tensor:
    """Return the log-probabilities of a completion's tokens under these weights, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        every = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize(("transport", "staging", "mode"), WAYS, ids=["-".join(way) for way in WAYS])
@pytest.mark.parametrize("bucket", ["one", "each"])
def test_what_is_served_is_what_was_sent(transport, staging, mode, bucket, fleet: Engines, tmp_path: Path) -> None:
    """Checked by the engines' own checksums at every publish, and by the log-probabilities of their output."""
    config = settings(fleet.config, transport=transport, staging=staging, pause_mode=mode, verify_every=1)
    weights = SeededWeights(fleet.addresses.model, share=0.05)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    if bucket == "each":
        publisher._settings = Small(publisher._settings)  # type: ignore[assignment]
    for version in (1, 2, 3):
        figures = publish(publisher, version)
        assert figures["engines"] == 2
        assert figures["verify"] > 0
    assert set(publisher.fleet.versions().values()) == {"3"}
    for found in ask(fleet, 4, 3, run=f"w-{transport}-{staging}-{mode}-{bucket}"):
        assert {span.version for span in found.versions} == {3}
        expected = logprobs(weights.at(3), fleet, PROMPT, found)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-4)
    publisher.fleet.close()


SIMULATED = ["fp8_simulated", "int8_simulated"] if "quantized" in lookup.shipped() else []


@pytest.mark.parametrize("kind", SIMULATED)
def test_values_on_the_grid_reach_the_engines_bit_for_bit(kind: str, fleet: Engines, tmp_path: Path) -> None:
    """Checked by the engines' own checksums, and by the log-probabilities of their output. The second publish is
    one of changes, if a transport does that."""
    config = settings(fleet.config, transport=[*EVERY_WAY, *LOADED][-1], verify_every=1)
    config = load(config.model_dump(mode="json") | {"quantized": {"format": kind}})
    weights, hf = SeededWeights(fleet.addresses.model, share=0.05), {"architectures": ["LlamaForCausalLM"]}
    publisher = make(config, fleet.addresses, weights, tmp_path)
    for version in (1, 2):
        figures = publish(publisher, version)
        assert (figures["engines"], figures["verify"] > 0) == (2, True)
    assert 0.001 < figures["quantization/error"] < 0.04
    grid = {name: pieces.tensor() for name, pieces in quantized(weights, hf, kind, torch.float32).stream()}
    changed = {name for name, tensor in weights.at(2).items() if not torch.equal(tensor, grid[name])}
    assert changed == {name for name in grid if name.endswith("_proj.weight")}
    (found,) = ask(fleet, 1, 2, run=f"w-{kind}")
    torch.testing.assert_close(torch.tensor(found.logprobs), logprobs(grid, fleet, PROMPT, found), rtol=0, atol=1e-4)
    assert (torch.tensor(found.logprobs) - logprobs(weights.at(2), fleet, PROMPT, found)).abs().max() > 1e-3
    publisher.fleet.close()


def test_request_across_five_publishes_tells_its_versions(fleet: Engines, tmp_path: Path) -> None:
    """Each span has the log-probabilities of its version's weights with `retract`, because the cache is computed
    again."""
    config = settings(fleet.config, transport="tensor", pause_mode="retract")
    weights = SeededWeights(fleet.addresses.model)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    _, answers = answers_across_publishes(publisher, fleet, 10, lambda _, found: len(found.versions) >= 3)
    for found in answers:
        for span in found.versions:
            expected = logprobs(weights.at(span.version), fleet, PROMPT, found)[span.start : span.end]
            served = torch.tensor(found.logprobs[span.start : span.end])
            torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)
    publisher.fleet.close()


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_request_in_flight_keeps_its_tokens_in_the_other_modes(mode: str, fleet: Engines, tmp_path: Path) -> None:
    config = settings(fleet.config, transport="tensor", pause_mode=mode)
    weights = SeededWeights(fleet.addresses.model, share=0.01)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    serving, answers = answers_across_publishes(publisher, fleet, 20, lambda _, found: len(found.versions) >= 2)
    for found in answers:
        first = found.versions[0]
        if mode == "in_place" and first.version > serving:
            continue  # a request on the wire at a pause may find the prompt in the cache of older weights
        expected = logprobs(weights.at(first.version), fleet, PROMPT, found)[: first.end]
        torch.testing.assert_close(torch.tensor(found.logprobs[: first.end]), expected, rtol=0, atol=1e-4)
    publisher.fleet.close()


def test_token_at_an_in_place_pause_has_its_makers_version(tmp_path: Path) -> None:
    """With SGLang's overlap scheduler, a step is in flight when the pause arrives. The first token of an answer's
    second version must not be one that the first version's weights made (engine/sglang_hooks.py)."""
    with engines(tmp_path, "+engine.server_args.disable_overlap_schedule=false") as running:
        weights = SeededWeights(running.addresses.model)
        publisher = make(settings(running.config, transport="tensor"), running.addresses, weights, tmp_path)
        serving, answers = answers_across_publishes(publisher, running, 50, _changes_from)
        publisher.fleet.close()
    for found in (found for found in answers if _changes_from(serving, found)):
        first = found.versions[0].end
        gaps = (torch.tensor(found.logprobs) - logprobs(weights.at(serving), running, PROMPT, found)).abs()
        assert gaps[:first].max() < 1e-4
        assert gaps[first] > 1e-3


def _changes_from(serving: int, found: Completion) -> bool:
    """Return whether an answer begins under this version and goes on under a later one."""
    return len(found.versions) > 1 and found.versions[0].version == serving


class OneWrongBit(TensorTransport):
    """Transport that sends everything correctly, and then one tensor with a flipped bit to one engine."""

    def __init__(self, *arguments: Any, victim: str) -> None:
        super().__init__(*arguments)
        self._victim = victim

    def send(self, flat: torch.Tensor, bucket: Bucket) -> None:
        super().send(flat, bucket)
        wrong = self.allocate(flat.numel(), flat.device).copy_(flat)
        wrong[bucket[0].start] ^= 1
        others = [url for url in self._fleet.serving if url != self._victim]
        held, self._fleet.serving = self._fleet.serving, [self._victim]
        super().send(wrong, bucket[:1])
        self._fleet.serving = held
        assert others


def test_engine_with_other_weights_is_out_and_may_rejoin(
    fleet: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(fleet.config, transport="tensor", verify_every=1)
    weights = SeededWeights(fleet.addresses.model)
    publisher = make(config, fleet.addresses, weights, tmp_path)
    victim = fleet.addresses.engines[1]
    publish(publisher, 29)  # whatever an earlier test has left
    publisher._transport = OneWrongBit(publisher.fleet, 2, victim=victim)
    figures, answers = asyncio.run(publish_under_way(publisher, fleet, 29, [30]))
    assert figures["engines"] == 1
    assert len(answers) == 24
    for found in answers:  # also those that the lost engine was writing: it was paused in place
        whole(found)
    first = next(iter(weights.at(0)))
    reason = publisher.fleet.lost[victim]
    assert "holds other weights than were sent" in reason
    assert first.replace("q_proj", "qkv_proj") in reason
    assert victim in capsys.readouterr().err
    assert routed(fleet, fleet.addresses.engines[:1])
    for found in ask(fleet, 6, 30, run="w-without-victim"):
        torch.testing.assert_close(
            torch.tensor(found.logprobs), logprobs(weights.at(30), fleet, PROMPT, found), rtol=0, atol=1e-4
        )
    publisher._transport = TensorTransport(publisher.fleet, 2)
    publisher.fleet.join(victim)
    assert publish(publisher, 31)["engines"] == 2
    assert routed(fleet, fleet.addresses.engines)
    publisher.fleet.close()


def routed(fleet: Engines, expected: tuple[str, ...]) -> bool:
    """Wait until the router knows exactly these engines, which it adds and removes with delay.

    Return whether it did.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        workers = httpx.get(f"{fleet.addresses.router}/workers", **fleet.addresses.access.http).json()["workers"]
        if {worker["url"] for worker in workers if worker["is_healthy"]} == set(expected):
            return True
        time.sleep(0.2)
    return False


def test_engines_in_both_parallelisms_write_as_an_export(fleet: Engines, tmp_path: Path) -> None:
    """Greedy answers agree token by token."""
    weights = SeededWeights(fleet.addresses.model)
    exported = tmp_path / "exported"
    shutil.copytree(fleet.addresses.model, exported)
    save_file(weights.at(40), exported / "model.safetensors", metadata={"format": "pt"})
    with engines(tmp_path, f"model.path={exported}") as fresh:
        publishers = []
        for running in (fleet, fresh):  # the fresh one starts from version 0 of the exported folder
            source = SeededWeights(fleet.addresses.model)
            config = settings(running.config, transport="tensor")
            publishers.append(make(config, running.addresses, source, tmp_path))
        from_export = greedy(fresh, fresh.addresses.engines[0])
        for publisher in publishers:
            publish(publisher, 40)
            publisher.fleet.close()
        published = [greedy(fleet, url) for url in fleet.addresses.engines]  # tensor-parallel 2
        alone = greedy(fresh, fresh.addresses.engines[0])  # tensor-parallel 1
    assert from_export == alone == published[0] == published[1]


def greedy(fleet: Engines, url: str) -> list[list[int]]:
    """Return one engine's greedy answers to some prompts, requested directly."""
    body = {
        "input_ids": [[12, a, b, 3, 11] for a in range(4) for b in range(4)],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 32},
    }
    answers = httpx.post(f"{url}/generate", json=body, **fleet.addresses.access.http, timeout=300.0).json()
    return [answer["output_ids"] for answer in answers]


class Small:
    """Settings with one bucket per tensor."""

    def __init__(self, settings: object) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> object:
        return 0 if name == "bucket_mb" else getattr(self._settings, name)
