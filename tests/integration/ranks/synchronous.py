"""What drivers of a training loop make of the same answers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from asyncrl.agents.template import ChatTemplate
from asyncrl.config import Config, read
from asyncrl.metrics.record import StepLog
from asyncrl.models import catalog
from asyncrl.network.addresses import Access, Addresses
from asyncrl.parallel import Parallel
from asyncrl.rollout.parts import load_tokenizer, stop_tokens
from asyncrl.rollout.prompts import Prompts
from asyncrl.schema import Batch, Completion, Group, VersionSpan
from asyncrl.tasks.build import build_all
from asyncrl.trainer.batch_source import RolloutClient
from asyncrl.trainer.feed import BatchFeed
from asyncrl.trainer.loop import train
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.stop import StopRule
from asyncrl.weights.export import save_hf
from tests import synchronous
from tests.integration.ranks.joining import joined
from tests.rollout.machinery import Machinery, RecordedEngine, recorded

Outcome = tuple[list[list[Group]], list[dict[str, float]]]
"""The groups of each batch, and the figures of each step."""


class Bench:
    """A policy, the stream of prompts and the task, all in their initial states."""

    def __init__(self, config: Config, folder: Path, parallel: Parallel) -> None:
        self.config, self.model, self.parallel = config, catalog.resolve(config.model.path), parallel
        self.policy = Policy(config, self.model, parallel)
        ((self.name, self.task),) = build_all(config).items()
        self.tokenizer = load_tokenizer(self.model, None)
        self.template = ChatTemplate(self.tokenizer)
        self.prompts = Prompts(config, {self.name: self.task}, self.template, model_length=64)
        self.training = self.prompts.training[self.name]
        self.folder = folder
        folder.mkdir()

    def plain(self, ask: synchronous.Ask, publish: Callable[[int], None] = lambda version: None) -> Outcome:
        """Repeat: generate, train, publish."""
        config = self.config
        trained: list[list[Group]] = []
        figures: list[dict[str, float]] = []
        batches = synchronous.batches(ask, self.training, self.task, self.template.decode, config.rollout.batch_groups)
        for version, groups in enumerate(islice(batches, config.run.max_steps)):
            trained.append(groups)
            figures.append(self.policy.update(Batch(version, groups, {})))
            publish(len(trained))
        return self.leave(trained, figures)

    def machinery(self, bound: int) -> Outcome:
        """Run the real parts with an engine of recorded answers that accepts new weights immediately."""
        rollout, engine = self.config.rollout, RecordedEngine(seed=bound)
        made = Machinery(
            engine,
            batch_groups=rollout.batch_groups,
            group_size=rollout.group_size,
            max_staleness=bound,
            training=self.training,
            task=self.task,
            name=self.name,
            template=self.template,
        )
        with served(made) as url:
            source = RolloutClient(url, Access("key0"), batch_timeout=60.0)
            batches = Kept(source, lambda: False, self.parallel)
            log = StepLog([], started_at=time.time())
            publisher: Any = Relabelled(engine, source)
            train(self.policy.update, batches, publisher, log, StopRule(self.config.run), save=lambda version: None)
        return self.leave(batches.groups, log.steps)

    def leave(self, trained: list[list[Group]], figures: list[dict[str, float]]) -> Outcome:
        """Write the weights to hf/, and return the outcome for the test to compare."""
        self.save("hf")
        return trained, figures

    def save(self, name: str) -> Path:
        save_hf(self.folder / name, self.model, self.policy.weights, self.parallel, self.config.trainer.dtype)
        return self.folder / name


class Kept(BatchFeed):
    """Batch source that keeps its batches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups: list[list[Group]] = []

    def get(self, version: int, part: int = 0) -> Batch | None:
        batch = super().get(version, part)
        assert batch is not None
        self.groups.append(batch.groups)
        return batch


class Relabelled:
    """Replacement of a Publisher that changes only the version, because the engine's answers are recorded."""

    def __init__(self, engine: RecordedEngine, source: RolloutClient) -> None:
        self._engine, self._source = engine, source

    def publish(self, version: int) -> dict[str, float]:
        self._source.hold()
        self._engine.version = version
        self._source.announce(version)
        return dict.fromkeys(("pause", "verify", "engines", "bytes"), 0.0)


@contextmanager
def served(made: Machinery) -> Iterator[str]:
    """Run the rollout side in a thread, behind a real server."""
    source = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(made.server.app(), log_level="warning"))

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(made.worker.run())
            await server.serve(sockets=[source])
            working.cancel()
        await made.client.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{source.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


class Engine:
    """Real engine, used with plain requests."""

    def __init__(self, bench: Bench, addresses: Addresses) -> None:
        self._bench, self._addresses = bench, addresses
        fresh = httpx.Limits(max_keepalive_connections=0)  # an engine closes connections that were idle for 5 s
        self._http = httpx.Client(timeout=60.0, limits=fresh, **addresses.access.http)
        self._asked = 0

    def ask(self, prompt: list[int], version: int) -> list[Completion]:
        rollout = self._bench.config.rollout
        self._asked += 1
        sampling = {
            "n": rollout.group_size,
            "temperature": rollout.temperature,
            "max_new_tokens": rollout.max_new_tokens,
            "stop_token_ids": stop_tokens(self._bench.model, self._bench.tokenizer),
            "skip_special_tokens": False,
        }
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return [
            _completion(answer)
            for answer in self._post(
                f"{self._addresses.router}/generate", {**body, "extra_key": f"plain-{self._asked}"}
            )
        ]

    def load(self, version: int) -> None:
        body = {"model_path": str(self._bench.save(f"hf-{version}")), "weight_version": str(version)}
        assert self._post(f"{self._addresses.engines[0]}/update_weights_from_disk", body)["success"]

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        return self._http.post(url, json=body).raise_for_status().json()


def _completion(answer: dict[str, Any]) -> Completion:
    meta = answer["meta_info"]
    return Completion(
        answer["output_ids"],
        [logprob for logprob, _, _ in meta["output_token_logprobs"]],
        [VersionSpan(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]],
        meta["finish_reason"]["type"],
    )


def recorded_answers(folder: Path) -> dict[str, Outcome]:
    """Return what drivers make of recorded answers, each from the same start: the plain synchronous one, and the real
    rollout side, feed and loop at bound 0, and in order at bound 3. All must train the same, to the bit."""
    config = read(folder)
    parallel = joined(config.trainer, config.run.seed)
    plain = Bench(config, folder / "plain", parallel)
    found = {"plain": plain.plain(lambda prompt, version: recorded(prompt, config.rollout.group_size, version))}
    for bound in (0, 3):
        name = f"bound-{bound}"
        found[name] = Bench(config, folder / name, parallel).machinery(bound)
    return found


def plain_on_engine(folder: Path) -> Outcome:
    """Return what the plain driver makes of the answers of the engine that the folder's addresses name, which it loads
    from files: a run at bound 0 must train the same, to the bit."""
    config = read(folder)
    plain = Bench(config, folder / "plain", joined(config.trainer, config.run.seed))
    engine = Engine(plain, Addresses.read(folder))
    return plain.plain(engine.ask, engine.load)
