"""The rollout side as asyncrl/rollout/__main__.py wires it, in front of an engine whose answers are recorded and whose
timing is not: when it writes, when what it wrote arrives, and in which order, is drawn at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import httpx
import msgspec
from hypothesis import strategies as st

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.engine.session import GenerationSession
from asyncrl.rollout import snapshot
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.journal import NoJournal
from asyncrl.rollout.limiter import FixedConcurrency
from asyncrl.rollout.parts import PlayingParts
from asyncrl.rollout.player import GroupPlayer, PlaysGroups
from asyncrl.rollout.prompts import Cursor
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.snapshot import GroupsState, ResumableBuffer, ResumableGroups, Snapshot
from asyncrl.rollout.worker import Worker
from asyncrl.schema import Batch, Completion, Group, Prompt, Template, VersionSpan, decode_batch
from asyncrl.tasks import Task
from asyncrl.tasks.scores import TaskScoreReward
from tests import synchronous
from tests.fakes import FakeEngine, FakeTemplate, LengthTask, pieces, prompts

EOS, LONGEST = 10, 8
KEY = {"authorization": "Bearer key0"}


def recorded(prompt: list[int], count: int, version: int = 0, longest: int = LONGEST) -> list[Completion]:
    """The answers to a prompt: a function of the prompt alone, but for the version that wrote them."""
    draw = random.Random(str(prompt))
    found = []
    for _ in range(count):
        ids = [draw.randrange(10) for _ in range(draw.randint(1, longest))]
        finish = "length" if len(ids) == longest else "stop"
        if finish == "stop":
            ids[-1] = EOS
        logprobs = [-draw.uniform(1.5, 3.5) for _ in ids]
        found.append(Completion(ids, logprobs, [VersionSpan(version, 0, len(ids))], finish))
    return found


def without_versions(groups: list[Group]) -> Any:
    """Everything else of them."""
    records = msgspec.to_builtins(groups)
    for group in records:
        for turns, _ in group[3]:
            for turn in turns:
                turn[1][2] = []
    return records


class RecordedEngine(FakeEngine):
    """Serves a version, and keeps books of which version wrote what. It writes nothing while it is paused; what it
    wrote may arrive after any number of publishes."""

    def __init__(self, seed: int, *, jitter: int = 25, longest: int = LONGEST, fails: float = 0.0) -> None:
        """`jitter` bounds the turns of the event loop that pass before a piece is written, and until it arrives;
        `fails` is the share of requests that are refused."""
        super().__init__(self._reply)
        self._random, self._jitter, self._longest, self._fails = random.Random(seed), jitter, longest, fails
        self.version = 0
        self.wrote: dict[tuple[int, ...], list[list[VersionSpan] | None]] = {}
        """Of each prompt's samples, those that have arrived."""
        self.serving = asyncio.Event()
        self.serving.set()

    def _reply(self, request: dict[str, Any]) -> AsyncIterator[bytes] | httpx.Response:
        if self._random.random() < self._fails:
            return httpx.Response(400, text="refused")
        return self._stream(request["input_ids"], request["sampling_params"]["n"])

    async def _stream(self, prompt: list[int], count: int) -> AsyncIterator[bytes]:
        """A request for fewer samples than there were is for those that have not arrived; one for all of them, after
        the process that had asked for them has died, is answered from the start."""
        books = self.wrote.setdefault(tuple(prompt), [None] * count)
        if count == len(books):
            books = self.wrote[tuple(prompt)] = [None] * count
        numbers = [number for number, spans in enumerate(books) if spans is None]
        assert len(numbers) == count, f"{count} samples asked for, {len(numbers)} have not arrived"
        answers = recorded(prompt, len(books), longest=self._longest)
        samples = [pieces(answers[number], i) for i, number in enumerate(numbers)]
        spans: list[list[VersionSpan]] = [[] for _ in samples]
        order = [i for i, events in enumerate(samples) for _ in events]
        self._random.shuffle(order)
        for i in order:
            await self._idle()
            await self.serving.wait()
            event = samples[i].pop(0)
            _extend(spans[i], self.version, len(event["output_ids"]))
            if not samples[i]:
                told = [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans[i]]
                event["meta_info"]["weight_versions"] = told
            await self._arrive(prompt, last=not samples[i])
            if not samples[i]:
                books[numbers[i]] = spans[i]
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _arrive(self, prompt: list[int], *, last: bool) -> None:
        """A piece that was written is on its way."""
        await self._idle()

    async def _idle(self) -> None:
        for _ in range(self._random.choice([0, 1, self._jitter // 5, self._jitter])):
            await asyncio.sleep(0)


def _extend(spans: list[VersionSpan], version: int, tokens: int) -> None:
    """`tokens` further tokens of this version."""
    start = spans[-1].end if spans else 0
    if spans and spans[-1].version == version:
        spans.append(VersionSpan(version, spans.pop().start, start + tokens))
    else:
        spans.append(VersionSpan(version, start, start + tokens))


class NoEvaluations:
    """None is due at any version."""

    def published(self, version: int) -> None: ...


class Machinery:
    """Client, buffer, groups and worker; and a trainer that asks at the server's source."""

    def __init__(
        self,
        engine: RecordedEngine,
        *,
        batch_groups: int,
        group_size: int,
        max_staleness: int,
        lead: int | None = None,
        overlap: bool = False,
        max_running: int | None = None,
        training: Iterator[Prompt] | None = None,
        task: Task | None = None,
        agent: Agent | None = None,
        name: str = "length",
        template: Template | None = None,
        journal: NoJournal = NoJournal(),  # noqa: B008  it has no state
        **client: Any,
    ) -> None:
        self.engine, self.new_client = engine, lambda: engine.client(**client)
        self.client = self.seen_client()
        self.buffer = ResumableBuffer(batch_groups, max_staleness, lead, overlap=overlap)

        scored = task or LengthTask()
        evaluations: Any = NoEvaluations()
        stream = training or prompts()
        self.groups = ResumableGroups(self.buffer, self.client)
        self.server = RolloutServer(
            self.groups, self.client.inflight, evaluations, "key0", save=self._save, journal=journal
        )
        self.outstanding: list[tuple[Ticket, Prompt, Sequence[GenerationSession]]] = []
        failures = FailureReporter(lambda text, trace: None)
        playing = GroupPlayer(
            {name: agent or SingleTurn()},
            {name: TaskScoreReward(scored)},
            template or FakeTemplate(lambda ids: "x" * len(ids)),
            EpisodeTimeouts(agent=60.0, reward=60.0, episode=None),
            failures,
        )
        self.new_parts = lambda: PlayingParts(self.new_client(), {}, {}, playing, 5.0, print)
        self.worker = Worker(
            self.groups,
            self.client,
            self.plays(playing),
            lambda version: next(stream),
            FixedConcurrency(max_running) if max_running else ConcurrencyLimiter(),
            group_sizes={name: group_size},
            max_failures=10**6,
            max_rejections=1000,
        )

    def seen_client(self) -> Any:
        """Return the client, as all but what plays see it."""
        return self.new_client()

    def plays(self, here: GroupPlayer) -> PlaysGroups:
        """Return what plays groups."""
        return here

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Begin to play."""

    def stop(self) -> None:
        """Cancel what `begin` has created in the group."""

    async def end(self) -> None:
        """End what was begun."""

    def _save(self, state: GroupsState, number: int) -> bytes:
        told = Snapshot(state, Cursor(state.drawn, {}), {}, evaluating=False, number=number)
        return snapshot.encode(told)

    def go_on(self, saved: bytes, prompt: Callable[[str], Prompt]) -> None:
        """Resume from a snapshot; `prompt` returns the prompts that were drawn before."""
        whole = snapshot.decode(saved)
        playing = self.groups.restore(whole.service)
        self.outstanding = [(one.ticket, prompt(one.prompt.uid), one.siblings) for one in playing]

    def batches(self, steps: int, train: Callable[[Batch], None] = lambda batch: None) -> list[Batch]:
        """Return the batches of a trainer that trains and publishes one after the other, or with overlap."""
        return asyncio.run(asyncio.wait_for(self._batches(steps, train), 120))

    def snapshot(self, steps: int, train: Callable[[Batch], None] = lambda batch: None) -> tuple[list[Batch], bytes]:
        """So many batches, and what a checkpoint keeps after them."""
        saved: list[bytes] = []
        return asyncio.run(asyncio.wait_for(self._batches(steps, train, saved), 120)), saved[0]

    async def _batches(
        self, steps: int, train: Callable[[Batch], None], saved: list[bytes] | None = None
    ) -> list[Batch]:
        source = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.server.app()), base_url="http://service", headers=KEY
        )
        found = []
        async with source, asyncio.TaskGroup() as group:  # the worker's death ends the trainer
            first = self.buffer.version
            if first:  # it goes on
                await source.post("/version", json={"version": first})
            await self.begin(group)
            working = group.create_task(self.worker.run(self.outstanding))
            publishing: asyncio.Task[None] | None = None
            for version in range(first, first + steps):
                while (answer := await source.get("/batch", params={"version": version})).status_code == 202:
                    pass
                batch = decode_batch(answer.raise_for_status().content)
                train(batch)
                found.append(batch)
                if publishing:
                    await publishing
                publishing = group.create_task(self._publish(source, version + 1))
                if not self.buffer.ahead:
                    await publishing
            if publishing:
                await publishing
            if saved is not None:
                answer = await source.post("/snapshot", json={"version": first + steps})
                saved.append(answer.raise_for_status().content)
            working.cancel()
            self.stop()
        await self.end()
        await self.client.close()
        return found

    async def _publish(self, source: httpx.AsyncClient, version: int) -> None:
        await self.engine._idle()
        await source.post("/hold")
        self.engine.serving.clear()
        await self.engine._idle()
        self.engine.version = version
        self.engine.serving.set()
        (await source.post("/version", json={"version": version})).raise_for_status()

    @property
    def overtaken(self) -> int:
        """Requests that a publish overtook; the batches carry those before."""
        return self.client.inflight.figures.continued["overtaken"]


STEPS = 5


@dataclass
class Timing:
    """Timing of a run, which may vary without changing the result."""

    seed: int
    jitter: int
    max_running: int | None
    cache_key: str
    pause_mode: str


timings = st.builds(
    Timing,
    seed=st.integers(0, 2**32),
    jitter=st.sampled_from([0, 5, 25]),
    max_running=st.sampled_from([None, 1, 3]),
    cache_key=st.sampled_from(["version", "group"]),
    pause_mode=st.sampled_from(["in_place", "retract"]),
)
shapes = st.fixed_dictionaries({"batch_groups": st.integers(1, 4), "group_size": st.integers(1, 3)})


def machinery(timing: Timing, fails: float = 0.0, kind: type[Machinery] = Machinery, **settings: Any) -> Machinery:
    values = asdict(timing)
    engine = RecordedEngine(values.pop("seed"), jitter=values.pop("jitter"), fails=fails)
    return kind(engine, **values, **settings)


def plain(batch_groups: int, group_size: int) -> list[list[Group]]:
    """Return what the synchronous driver trains."""
    driver = synchronous.batches(
        lambda prompt, version: recorded(prompt, group_size, version),
        prompts(),
        LengthTask(),
        lambda ids: "x" * len(ids),
        batch_groups,
    )
    return list(islice(driver, STEPS))


def same_bytes(one: object, other: object) -> bool:
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
