"""Real engines behind the real router, as the launcher starts them, without the rest of a run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from asyncrl import lookup
from asyncrl.config import Config, load
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.router import RouterWorkers, wait_until_ready
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.machine import this_node
from asyncrl.launch.placement import Seat, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.launch.precision import resolve
from asyncrl.models import catalog
from asyncrl.models.architectures import flat
from asyncrl.network.addresses import Addresses
from asyncrl.network.tls import Authority
from asyncrl.schema import Completion
from tests.fakes import compose_values
from tests.integration.publisher import publish

PROMPT, EOS = [12, 1, 2, 3, 11], 10
OF_EXTENSIONS = lookup.offered("transports")
"""Transports of extensions that are there, which go through the tests of all transports."""
EVERY_WAY = ("tensor", "distributed", *OF_EXTENSIONS)
LOADED = [name for name, offered in OF_EXTENSIONS.items() if offered.loader][:1]
"""One of them that engines load by a loader of its own."""
LOADER = tuple(f"weights.transport={name}" for name in LOADED)
"""The setting with which engines are started that also load what such a transport sends."""
START = 400.0
"""Time limit for engines to start in seconds: many times what they take on an idle machine."""


def logprobs(model: torch.nn.Module, answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities of an answer's tokens, computed by transformers."""
    with torch.no_grad():
        every = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return every.gather(1, torch.tensor(answer)[:, None])[:, 0]


class Engines:
    """Started processes by name, which tests may kill and start again."""

    def __init__(self, config: Config, addresses: Addresses, specs: list[ProcessSpec], folder: Path) -> None:
        self.config, self.addresses = config, addresses
        self._specs, self.folder = {spec.name: spec for spec in specs}, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._own = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}  # a run has a TMPDIR of its own for such files

    def start(self, name: str) -> None:
        spec = self._specs[name]
        with (self.folder / f"{name}.log").open("a") as log:
            self._running[name] = subprocess.Popen(
                spec.argv, env={**os.environ, **self._own, **spec.env}, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kill the whole process group with SIGKILL."""
        self.signal(name, signal.SIGKILL)
        self._running.pop(name).wait(120)

    def signal(self, name: str, number: int) -> None:
        os.killpg(self._running[name].pid, number)

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def revive(self) -> None:
        """Start the processes that a test has killed, and wait until the router routes to every engine."""
        killed = [name for name in self._specs if name not in self._running]
        for name in killed:
            self.start(name)
        if not killed:
            return
        for url in (self.addresses.router, *self.addresses.engines):
            self.wait_for(url)
        workers = RouterWorkers(self.addresses.router, self.addresses.access, START)
        workers.keep(self.addresses.engines)
        deadline = time.monotonic() + START
        while self._routed() != set(self.addresses.engines):
            assert time.monotonic() < deadline, f"the router routes to {self._routed()} alone; see {self.folder}"
            time.sleep(0.2)

    def _routed(self) -> set[str]:
        answer = httpx.get(f"{self.addresses.router}/workers", **self.addresses.access.http)
        return {worker["url"] for worker in answer.json()["workers"] if worker["is_healthy"]}

    def wait_for(self, url: str, timeout: float = START) -> None:
        """Wait until a restarted engine answers."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if httpx.get(f"{url}/health", **self.addresses.access.http).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            assert time.monotonic() < deadline, f"{url} did not come up in {timeout} s; see {self.folder}"
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def over_two_machines(seat: Seat) -> list[Seat]:
    """Return the seats of an engine of two ranks on two machines; 127.0.0.2 is this machine too."""
    second = this_node("127.0.0.2", None, 0, 1)
    return [seat, Seat(second, port=second.ports[0], scheme=seat.scheme)]


def planned(
    folder: Path, *overrides: str, experiment: str = "tiny", gpus: int = 0, last_spans: bool = False
) -> tuple[Config, Addresses, list[ProcessSpec]]:
    """Return what the launcher would start of an experiment with these overrides: engines and the router alone."""
    config = load(compose_values(f"experiment={experiment}", *overrides))
    placement = place(config, [this_node(config.cluster.host, None, gpus, ports_wanted(config))])
    model = catalog.resolve(config.model.path)
    hf = flat(json.loads((model / "config.json").read_text()))
    config = resolve(config, {"trainer": hf, "engine": hf}, placement, gpus, cluster_of(config)).config
    if last_spans:
        placement.engines[-1] = over_two_machines(placement.engines[-1][0])
    authority = Authority.create(folder)
    authority.sign(placement.listening())
    addresses = Addresses(
        "fleet-test",
        "the-run's-key",
        model,
        gpus=gpus,
        started_at=0.0,
        authority=authority.certificate,
        **placement.urls(),
    )
    specs = plan(config, addresses, placement, folder)
    return config, addresses, [spec for spec in specs if spec.name.startswith(("engine", "router"))]


@contextmanager
def engines(
    folder: Path, *overrides: str, experiment: str = "tiny", gpus: int = 0, last_spans: bool = False
) -> Iterator[Engines]:
    """Start the engines and the router of an experiment with these overrides, and wait until they are ready."""
    config, addresses, specs = planned(folder, *overrides, experiment=experiment, gpus=gpus, last_spans=last_spans)
    made = Engines(config, addresses, specs, folder)
    try:
        for spec in specs:
            made.start(spec.name)
        asyncio.run(wait_until_ready(addresses, START))
        yield made
    finally:
        made.close()


def settings(config: Config, **weights: object) -> Config:
    return config.model_copy(update={"weights": config.weights.model_copy(update={"timeout": 30.0, **weights})})


def client(fleet: Engines, **changes: object) -> GenerationClient:
    values = {
        "run": "w",
        "max_new_tokens": 48,
        "temperature": 1.0,
        "stop_token_ids": [EOS],
        "retry_timeout": 30.0,
        "coalesce": False,
    }
    http = GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 60.0)
    return GenerationClient(http, ClientSettings(**{**values, **changes}))  # type: ignore[arg-type]


def answers_across_publishes(
    publisher: Any, fleet: Engines, first: int, enough: Callable[[int, Completion], bool]
) -> tuple[int, list[Completion]]:
    """Publish a version, then five more while requests are in flight. Return the version and the whole answers, of
    which one is `enough`. Try again from later versions if none is: where others work, too, answers may end before the
    publishes."""
    for serving in range(first, first + 1000, 100):
        publish(publisher, serving)
        _, answers = asyncio.run(publish_under_way(publisher, fleet, serving, range(serving + 1, serving + 6)))
        for found in answers:
            whole(found)
        if any(enough(serving, found) for found in answers):
            return serving, answers
    pytest.fail("the publishes fell outside the answers")


def ask(fleet: Engines, count: int, version: int, **changes: object) -> list[Completion]:
    async def answers() -> list[Completion]:
        made = client(fleet, **changes)
        made.inflight.release(version)
        generate = made.generate()
        found = await asyncio.gather(*[generate(PROMPT) for _ in range(count)])
        await made.close()
        return found

    return asyncio.run(answers())


def reloaded(model: Path, tensors: dict[str, torch.Tensor], folder: Path) -> torch.nn.Module:
    """Return a model with these tensors, whose experts transformers stacks as it loads them."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def whole(found: Completion) -> None:
    """Check that an answer is complete: it ended as the model or the limit requires, and every token has its
    log-probability."""
    assert len(found.token_ids) == len(found.logprobs)
    assert len(found.token_ids) == 48 or found.token_ids[-1] == EOS
    assert EOS not in found.token_ids[:-1]
    assert [span.start for span in found.versions[1:]] == [span.end for span in found.versions[:-1]]
    assert (found.versions[0].start, found.versions[-1].end) == (0, len(found.token_ids))
    assert [span.version for span in found.versions] == sorted({span.version for span in found.versions})


async def publish_under_way(
    publisher: Any, fleet: Engines, serving: int, versions: Iterable[int]
) -> tuple[dict[str, float], list[Completion]]:
    """Publish versions one after the other while requests are in flight.

    Return the figures of the last one, and the answers.
    """
    made = client(
        fleet,
        run=f"under-way-{serving}",
        pause_mode=publisher._update._mode,
        replicas=fleet.config.engine.data_parallel,
    )
    made.inflight.release(serving)
    loop = asyncio.get_running_loop()
    publisher.hold = lambda: loop.call_soon_threadsafe(made.inflight.hold)
    publisher.announce = lambda version: loop.call_soon_threadsafe(made.inflight.release, version)
    running = asyncio.gather(*[made.generate()(PROMPT) for _ in range(24)])
    await asyncio.sleep(0.02)
    while not all(sent.answered for sent in made.inflight._sent):  # noqa: ASYNC110  nothing tells
        await asyncio.sleep(0.001)
    for version in versions:
        figures = await asyncio.to_thread(publish, publisher, version)
    answers = await asyncio.wait_for(running, 300)
    await made.close()
    publisher.hold, publisher.announce = lambda: None, lambda version: None  # this loop ends
    return figures, answers
