"""Whatever dies while weights are on their way, no token is labelled with a version that did not write it.

A trainer's sending half (publisher.py, a process of its own) publishes version after version to two real engines while
requests stream through the router. At a random instant something fails. Then: the rest goes on or can be taken up,
every engine that serves has the whole of its version, and every token that anybody received has, under the weights of
the version that it is labelled with, the log-probability that came with it (computed by transformers; the updates
retract, so that no cache of older weights takes part).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engine.calls import CallRefused
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.errors import EngineError
from asyncrl.schema import Completion
from tests.integration.fleet import EVERY_WAY, Engines, settings
from tests.integration.publisher import SeededWeights, make, publish

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [12, 1, 2, 3, 11]
FAULTS = ["engine killed", "engine hangs", "trainer killed"]
DEADLINE = 400.0
CHECKED = 400
CALL_SECONDS = 10.0
"""Value of weights.timeout: how long an engine may hang before it is lost."""


@pytest.fixture(scope="module")
def closed(one_fleet: Engines) -> Iterator[Engines]:
    """Close the engines after this file, the last that uses them."""
    yield one_fleet
    one_fleet.close()


@pytest.fixture
def fleet(two_engines: Engines, closed: Engines) -> Engines:
    return two_engines


class Trainer:
    """Process that publishes weights."""

    def __init__(
        self, fleet: Engines, folder: Path, transport: str, first: int, serving: list[str], joining: list[str]
    ):
        weights = {
            "transport": transport,
            "staging": random.Random(first).choice(["full", "stream"]),
            "pause_mode": "retract",
            "verify_every": 1,
            "timeout": CALL_SECONDS,
        }
        values = fleet.config.model_dump(mode="json")
        order = {
            "config": {**values, "weights": {**values["weights"], **weights}},
            "run_dir": str(fleet.folder),
            "folder": str(folder),
            "serving": serving,
            "joining": joining,
            "first": first,
            "last": first + 100_000,
            "pause": 0.02,
        }
        self._out = folder / f"trainer-{first}.log"
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.publisher", json.dumps(order)],
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        return self._out.read_text()

    def published(self) -> list[tuple[int, int]]:
        """Return (version, number of engines that serve it) of each publish."""
        words = [line.split() for line in self.said().splitlines() if line.startswith("published ")]
        return [(int(word[1]), int(word[3])) for word in words]

    def wait_for(self, count: int, serving: int) -> None:
        """Wait until `count` versions were published to `serving` engines."""
        deadline = time.monotonic() + DEADLINE
        while sum(engines_ == serving for _, engines_ in self.published()) < count:
            assert self.process.poll() is None, self.said()[-3000:]
            assert time.monotonic() < deadline, f"not {count} versions on {serving} engines:\n{self.said()[-3000:]}"
            time.sleep(0.02)

    def last_attempt(self) -> int:
        return max(int(line.split()[1]) for line in self.said().splitlines() if line.startswith("publishing "))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


class Traffic:
    """Requests through the router in four concurrent sequences, until the context is left."""

    def __init__(self, fleet: Engines) -> None:
        self._fleet = fleet
        self.answers: list[Completion] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(300)
        assert not self._thread.is_alive(), "a request never came back"

    async def _run(self) -> None:
        client = GenerationClient(
            GenerateEndpoint(self._fleet.addresses.router, self._fleet.addresses.access, 30.0),
            ClientSettings(
                run=f"traffic-{time.monotonic()}",
                max_new_tokens=24,
                temperature=1.0,
                stop_token_ids=[10],
                retry_timeout=60.0,
                coalesce=False,
            ),
        )
        await asyncio.gather(*[self._lane(client) for _ in range(4)])
        await client.close()

    async def _lane(self, client: GenerationClient) -> None:
        generate = client.generate()
        while not self._stop.is_set():
            try:
                self.answers.append(await generate(PROMPT))
            except EngineError as error:
                self.failures.append(str(error))
                await asyncio.sleep(0.2)


def check_labels(fleet: Engines, answers: list[Completion]) -> int:
    """Check that every token whose version an engine reported has the log-probability of that version, and return the
    number of versions seen.

    Tokens of an engine that died have no reported version and take the oldest possible one. Of the answers by a single
    version only a sample is checked, because there are thousands between two faults.
    """
    mixed = [answer for answer in answers if len(answer.versions) > 1]
    plain = [answer for answer in answers if len(answer.versions) == 1]
    answers = [*mixed, *random.Random(0).sample(plain, min(len(plain), CHECKED))]
    weights = SeededWeights(fleet.addresses.model)
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=torch.float32)
    versions = sorted({span.version for answer in answers for span in answer.versions})
    for version in versions:
        model.load_state_dict(weights.at(version), strict=False)
        for answer in answers:
            spans = [span for span in answer.versions if span.version == version and not span.inferred]
            if not spans:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + answer.token_ids])).logits[0, len(PROMPT) - 1 : -1]
            every = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            for span in spans:
                served = torch.tensor(answer.logprobs[span.start : span.end])
                torch.testing.assert_close(served, every[span.start : span.end], rtol=0, atol=1e-4)
    return len(versions)


_next_version = 1


def trial(fleet: Engines, folder: Path, seed: int) -> None:
    """Inject one fault at one instant, and check what follows."""
    global _next_version
    choose = random.Random(seed)
    transport, fault = choose.choice(EVERY_WAY), choose.choice(FAULTS)
    victim = choose.randrange(2)
    urls = list(fleet.addresses.engines)
    trainer = Trainer(fleet, folder, transport, _next_version, urls, [])
    successor: Trainer | None = None
    try:
        with Traffic(fleet) as traffic:
            trainer.wait_for(choose.randint(1, 4), serving=2)
            time.sleep(choose.random() * 0.3)
            if fault == "trainer killed":
                trainer.kill()
                serving, joining = urls, []
            else:
                number = signal.SIGKILL if fault == "engine killed" else signal.SIGSTOP
                fleet.signal(f"engine-{victim}", number)
                trainer.wait_for(3, serving=1)  # the other goes on
                trainer.kill()
                fleet.kill(f"engine-{victim}")
                fleet.start(f"engine-{victim}")
                fleet.wait_for(urls[victim])
                serving, joining = [urls[1 - victim]], [urls[victim]]
            first = trainer.last_attempt() + 1
            successor = Trainer(fleet, folder, transport, first, serving, joining)
            successor.wait_for(3, serving=2)
            enough = len(traffic.answers) + 8
            deadline = time.monotonic() + DEADLINE
            while len(traffic.answers) < enough:
                assert time.monotonic() < deadline, f"no answers after the fault: {traffic.failures[-3:]}"
                time.sleep(0.05)
        _next_version = successor.last_attempt() + 1
    finally:
        for process in (trainer, successor):
            if process:
                process.kill()
    seen = check_labels(fleet, traffic.answers)
    print(
        f"trial {seed}: {transport}, {fault} ({victim}): {len(traffic.answers)} answers of {seen} versions, "
        f"{len(traffic.failures)} failed requests, {len(trainer.published())} + {len(successor.published())} publishes"
    )
    assert seen >= 2


@pytest.mark.integration
@pytest.mark.parametrize("seed", [1])
def test_no_token_has_a_version_that_did_not_write_it(seed: int, fleet: Engines, tmp_path: Path) -> None:
    trial(fleet, tmp_path, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 100 + int(os.environ.get("ASYNCRL_TRIALS", "20"))))
def test_no_token_is_labelled_wrongly_in_many_trials(seed: int, fleet: Engines, tmp_path: Path) -> None:
    trial(fleet, tmp_path, seed)


@pytest.mark.nightly
def test_engines_that_fail_within_a_broadcast_are_left_behind(fleet: Engines, tmp_path: Path) -> None:
    """One is killed when both wait for the weights, and later the other hangs. The one that is left gets the version,
    as its checksums say, and the one that joins again gets the next."""
    config = settings(fleet.config, transport="distributed", verify_every=1, timeout=CALL_SECONDS)
    urls = list(fleet.addresses.engines)
    publisher = make(config, fleet.addresses, SeededWeights(fleet.addresses.model), tmp_path)
    transport: Any = publisher._transport
    broadcast = transport._broadcast
    due: list[tuple[str, int]] = []

    def strike(flat: torch.Tensor) -> str:
        """Strike when the engines have been asked to receive."""
        if due:
            time.sleep(0.5)  # they wait for it by then; if not, they die a moment before
            fleet.signal(*due.pop())
        return str(broadcast(flat))

    transport._broadcast = strike
    version = 1_000_000
    assert publish(publisher, version)["engines"] == 2
    for number, by in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
        due.append((f"engine-{number}", by))
        began = time.monotonic()
        assert publish(publisher, version + 1)["engines"] == 1
        print(f"{signal.Signals(by).name}: published after {time.monotonic() - began:.1f} s")
        assert not due
        assert publisher.fleet.versions() == {urls[1 - number]: str(version + 1)}
        fleet.kill(f"engine-{number}")
        fleet.revive()
        publisher.fleet.join(urls[number])
        version += 2
        assert publish(publisher, version)["engines"] == 2
    name = {"group_name": transport._name}
    for url in urls:
        publisher.fleet.post(url, "/destroy_weights_update_group", name)
        with pytest.raises(CallRefused, match="does not exist"):
            publisher.fleet.post(url, "/destroy_weights_update_group", name)
    publisher.fleet.close()
