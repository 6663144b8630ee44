"""Processes that play episodes change nothing for the trainer, whether they live or die: the groups of one that dies
are played anew. The processes are tasks of this one, with real connections between them;
tests/integration/test_processes.py has real ones."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.engine.served import InUse
from asyncrl.errors import AsyncRLError, ConfigError, EpisodeFailed
from asyncrl.extensions.processes import wire, workers
from asyncrl.extensions.processes.encoded import EncodedGroup
from asyncrl.extensions.processes.extension import Processes
from asyncrl.extensions.processes.rendering import CHUNK
from asyncrl.extensions.processes.wire import Hello, connect
from asyncrl.extensions.processes.workers import EpisodeWorkers
from asyncrl.network.addresses import Access
from asyncrl.rollout import server
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.snapshot import ResumableBuffer, ResumableGroups
from asyncrl.schema import Batch, Generate, Prompt, Trajectory
from tests.examples import examples
from tests.extensions.processes.machinery import Deaths, ManyProcesses, pool_of
from tests.fakes import until
from tests.rollout.machinery import (
    KEY,
    STEPS,
    RecordedEngine,
    machinery,
    plain,
    same_bytes,
    shapes,
    timings,
    without_versions,
)


@given(timings, shapes, st.integers(2, 3))
@settings(max_examples=examples(6), deadline=None)
def test_bound_0_gives_equal_batches_for_any_processes(timing, shape, processes: int) -> None:
    """Byte for byte."""
    found = machinery(timing, kind=ManyProcesses, **shape, max_staleness=0, processes=processes).batches(STEPS)
    assert same_bytes([batch.groups for batch in found], plain(**shape))


def test_groups_of_dead_processes_are_played_anew() -> None:
    """It is checked at every batch and version. Every prompt is trained, none twice, within the bound."""
    replayed, discarded = (sum(counts) for counts in zip(*map(_with_deaths, range(examples(8))), strict=True))
    assert replayed
    assert discarded


def _with_deaths(seed: int) -> tuple[int, int]:
    """Return how many groups were played anew, and how many tokens were generated in vain. A process dies after every
    batch but the last."""
    chance = random.Random(seed)
    lead, slack = chance.randrange(3), chance.randrange(3)
    engine = RecordedEngine(seed, jitter=chance.choice([0, 5, 25]))
    made = ManyProcesses(engine, batch_groups=3, group_size=2, max_staleness=lead + slack, lead=lead, processes=3)
    dying = Deaths(made, chance, STEPS)

    def train(batch: Batch) -> None:
        for group in batch.groups:
            assert all(0 <= age <= lead + slack for age in group.staleness(batch.version))
            spans = [trajectory.turns[0].completion.versions for trajectory in group.trajectories]
            assert spans == engine.wrote[tuple(group.prompt_ids)]
            assert all(span.version >= born[group.uid] for one in spans for span in one)
        dying.after(batch)

    born: dict[str, int] = {}
    begin = made.buffer.begin

    def begun(ticket: Any, *arguments: Any) -> None:
        born[ticket.uid] = ticket.born
        begin(ticket, *arguments)

    made.buffer.begin = begun  # type: ignore[method-assign]
    batches = made.batches(STEPS, train)
    told = dying.told()
    assert told.keys() >= Processes.metrics.keys()
    assert told["processes/lost"] >= STEPS - 1
    ledger = made.groups.ledger()
    assert ledger.groups.rejected == {}
    asked = [tuple(group.prompt_ids) for batch in batches for group in batch.groups]
    assert len(set(asked)) == len(asked) == STEPS * 3
    if slack == 0:
        plainly = plain(batch_groups=3, group_size=2)
        assert [without_versions(one.groups) for one in batches] == [without_versions(one) for one in plainly]
    return int(told["processes/replayed"]), ledger.tokens.discarded


def test_at_bound_0_deaths_change_no_byte_of_the_batches() -> None:
    """A group that is played anew has its ticket, and so its slot, prompt and seeds."""
    replayed = 0
    for seed in range(examples(4)):
        chance, shape = random.Random(seed), {"batch_groups": 3, "group_size": 2}
        made = ManyProcesses(RecordedEngine(seed, jitter=25), **shape, max_staleness=0, processes=2)  # type: ignore[arg-type]
        dying = Deaths(made, chance, STEPS)
        found = made.batches(STEPS, dying.after)
        assert same_bytes([batch.groups for batch in found], plain(**shape))
        replayed += int(dying.told()["processes/replayed"])
    assert replayed


@pytest.mark.parametrize("seconds", [0.0, 600.0], ids=["the run goes on", "the run ends meanwhile"])
def test_lost_process_is_told_if_the_run_goes_on(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TOLD_SECONDS", seconds)
    replayed, warnings = 0.0, list[str]()
    for seed in range(8):
        made = ManyProcesses(RecordedEngine(seed), batch_groups=3, group_size=2, max_staleness=0, processes=2)
        made.pool._warn = lambda text, traceback=None: warnings.append(text)
        dying = Deaths(made, random.Random(seed), STEPS)
        made.batches(STEPS, dying.after)
        replayed += dying.told()["processes/replayed"]
    assert replayed
    assert any("are played anew" in one for one in warnings) == (seconds == 0)


def test_processes_render_questions_and_drop_failing_ones() -> None:
    made = ManyProcesses(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    pool: Any = made.pool

    def render(index: int) -> list[int]:
        if index == 3:
            raise ConfigError("task", index, "Fails.")
        return [12, index, 11]

    async def asking(*arguments: Any) -> None:
        for index in range(2 * CHUNK):
            pool.ahead.ask("length", index)
        await until(lambda: len(pool.ahead._came) == 2 * CHUNK - 1)
        found = [pool.ahead.take("length", index) for index in range(2 * CHUNK)]
        assert found == [None if index == 3 else [12, index, 11] for index in range(2 * CHUNK)]
        await run(*arguments)

    made.question, made.render = (lambda task, index: {"index": index}), (lambda question: render(question["index"]))
    run, made.worker.run = made.worker.run, asking  # type: ignore[method-assign]
    assert made.batches(1)


def test_group_that_kills_every_process_is_rejected() -> None:
    lethal = [12, 4, 11]

    class Lethal(SingleTurn):
        async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
            if prompt.token_ids == lethal:
                (number,) = (one.number for one in pool._connections.values() if "g00000004a0000" in one.groups)
                dying.begin(number)
                await asyncio.Event().wait()
            return await super().run(prompt, generate)

    made = ManyProcesses(RecordedEngine(0), batch_groups=2, group_size=1, max_staleness=0, processes=2, agent=Lethal())
    pool: Any = made.pool
    dying = Deaths(made, random.Random(0), STEPS)
    pool.most_losses = workers.LOSSES
    batches = made.batches(STEPS)
    assert dying.told()["processes/lost"] >= workers.LOSSES
    assert made.groups.ledger().groups.rejected == {"process": 1}
    assert lethal not in [group.prompt_ids for batch in batches for group in batch.groups]


def test_question_that_kills_every_process_fails_alone() -> None:
    lethal = [12, 500, 11]

    class Lethal(SingleTurn):
        async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
            if prompt.token_ids == lethal:
                (number,) = (one.number for one in pool._connections.values() if "e0" in one.groups)
                dying.begin(number)
                await asyncio.Event().wait()
            return await super().run(prompt, generate)

    made = ManyProcesses(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2, agent=Lethal())
    pool: Any = made.pool
    dying = Deaths(made, random.Random(0), STEPS)
    pool.most_losses = workers.LOSSES
    run = made.worker.run

    async def with_evaluation(*arguments: Any) -> None:
        sessions = [pool.generate(one, group="e0", purpose="evaluation", sample=f"e {one}") for one in (0.0, 1.0)]
        attempts = await pool.attempts(Prompt("e", lethal, {}, "length", 500), sessions)
        assert [one.reason for one in attempts] == ["process"] * 2
        await run(*arguments)

    made.worker.run = with_evaluation  # type: ignore[method-assign]
    assert len(made.batches(2)) == 2
    assert dying.told()["processes/lost"] >= workers.LOSSES


def test_groups_are_not_decoded_beside_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work for a group must not grow with the length of the answers."""

    def decoded(_: EncodedGroup) -> Any:
        raise AssertionError("a group was decoded")

    monkeypatch.setattr(EncodedGroup, "group", property(decoded))
    made = ManyProcesses(RecordedEngine(0), batch_groups=2, group_size=2, max_staleness=1, processes=2)
    assert len(made.batches(3)) == 3


def test_groups_go_to_the_process_with_the_fewest_episodes() -> None:
    made = ManyProcesses(RecordedEngine(0), batch_groups=8, group_size=2, max_staleness=0, processes=2)
    most: list[int] = []

    def train(batch: Batch) -> None:
        most.append(max(abs(a - b) for a in loads for b in loads))

    loads = [0, 0]
    begin = EpisodeWorkers._answer

    async def answer(self: EpisodeWorkers, *arguments: Any) -> Any:
        found = asyncio.ensure_future(begin(self, *arguments))
        await asyncio.sleep(0)
        loads[:] = [one.episodes for one in self._connections.values()]
        assert abs(loads[0] - loads[1]) <= 2 or loads[0] + loads[1] < 16
        return await found

    made.pool._answer = answer.__get__(made.pool)  # type: ignore[union-attr, method-assign]
    made.batches(2, train)
    assert most


def test_error_of_ours_in_a_process_ends_the_run() -> None:
    def broken(request: dict[str, Any]) -> Any:
        raise KeyError("ours")

    made = ManyProcesses(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    made.engine._answer = broken
    with pytest.raises(BaseExceptionGroup) as caught:
        made.batches(1)
    (error,) = caught.value.exceptions
    assert isinstance(error, AsyncRLError)
    assert "a bug in asyncrl: KeyError('ours')" in str(error)


def test_question_that_differs_between_processes_ends_the_run() -> None:
    """Its answers would be scored by another question's record."""
    made = ManyProcesses(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    made.render = lambda question: [12, question["index"] + 1, 11]
    with pytest.raises(BaseExceptionGroup) as caught:
        made.batches(1)
    assert re.search(r"question\(0\) of length is another one in each process", str(caught.value.exceptions[0]))


def test_whoever_lacks_the_key_gets_nothing() -> None:
    async def main() -> None:
        pool, url = pool_of(2)
        serving = asyncio.create_task(pool.serve())
        starting = asyncio.create_task(pool.start())
        channel = await joined(url, "another")
        channel.send(Hello("another", 0))
        with pytest.raises(ConnectionError):
            await channel.receive()
        channel.close()
        assert not pool._connections
        assert not serving.done()
        for task in (starting, serving):
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_attempts_of_an_evaluation_share_a_process() -> None:
    made = ManyProcesses(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    played: list[Any] = []

    async def ask() -> None:
        assert made.pool
        sessions = [
            made.pool.generate(one, group="e0", purpose="evaluation", sample=f"e {number}")
            for number, one in enumerate([0.0, 1.0])
        ]
        played.extend(await made.pool.attempts(Prompt("e", [12, 500, 11], {}, "length", 500), sessions))
        assert made.engine._fails or all(one.received and one.activity.intervals(0.0) for one in sessions)

    run = made.worker.run

    async def with_evaluation(*arguments: Any) -> None:
        await ask()
        made.engine._fails = 1.0
        await ask()
        made.engine._fails = 0.0
        await run(*arguments)

    made.worker.run = with_evaluation  # type: ignore[method-assign]
    made.batches(2)
    assert [type(one).__name__ for one in played] == ["Trajectory"] * 2 + ["AsyncRLError"] * 2
    assert made.pool
    assert made.pool.tokens["evaluation"] == sum(one.num_tokens for one in played[:2])


async def joined(url: str, key: str = "key0") -> wire.Channel:
    """Connect as soon as the server listens."""
    while True:
        try:
            return await connect(url, Access(key))
        except OSError:
            await asyncio.sleep(0)


class Slow:
    """A process that confirms a command only when it is told to."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.commands = channel, list[Any]()

    async def read(self) -> None:
        while True:
            self.commands.append(await self.channel.receive())

    async def confirm(self, kind: type) -> None:
        await until(lambda: any(isinstance(one, kind) for one in self.commands))
        number = next(one.number for one in reversed(self.commands) if isinstance(one, kind))
        counts = wire.Counts({}, 0, 0, {"seconds_busy": 0.0}, {}, {}, {})
        self.channel.send(wire.Report(number, counts, {}, InUse([], {})))


def test_a_stopped_group_is_not_played_anew() -> None:
    """Its process dies before it has stopped it, or it waits for a process."""

    async def main() -> None:
        pool, url = pool_of(2)
        tasks = [asyncio.create_task(pool.serve())]
        slow = [Slow(await joined(url)) for _ in range(2)]
        for number, one in enumerate(slow):
            one.channel.send(Hello("key0", number))
            tasks.append(asyncio.create_task(one.read()))
        await until(lambda: len(pool._connections) == 2)
        starting = asyncio.create_task(pool.start())
        await until(lambda: all(one.commands for one in slow))
        for one in slow:
            await one.confirm(wire.Begin)
        await starting
        tickets, playing = [Ticket(0, 0), Ticket(1, 0)], list[asyncio.Task[Any]]()
        for ticket, one in zip(tickets, slow, strict=True):
            sessions = [pool.generate(group=ticket.uid, sample="s")]
            playing.append(asyncio.create_task(pool.play(ticket, Prompt("p", [1], {}, "t"), sessions)))
            await until(lambda one=one: isinstance(one.commands[-1], wire.Play))
        pool.stop(tickets[0], playing[0])
        slow[0].channel.close()
        with pytest.raises(EpisodeFailed):
            await playing[0]
        slow[1].channel.close()
        await until(lambda: not pool._connections)
        pool.stop(tickets[1], playing[1])
        await until(playing[1].cancelled)
        assert [sum(isinstance(sent, wire.Play) for sent in one.commands) for one in slow] == [1, 1]
        for task in tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_version_opens_when_every_process_has_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.05)

    async def main() -> None:
        pool, url = pool_of(2)
        groups = ResumableGroups(ResumableBuffer(1, 0), pool)  # type: ignore[arg-type]
        service = RolloutServer(groups, pool, None, "key0")  # type: ignore[arg-type]
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=service.app()), base_url="http://service", headers=KEY
        )
        tasks = [asyncio.create_task(pool.serve())]
        slow = []
        for number in range(2):
            slow.append(Slow(await joined(url)))
            slow[-1].channel.send(Hello("key0", number))
            tasks.append(asyncio.create_task(slow[-1].read()))
        await until(lambda: len(pool._connections) == 2)
        starting = asyncio.create_task(pool.start())
        for number, one in enumerate(slow):
            await until(lambda one=one: one.commands)
            assert not starting.done(), number
            await one.confirm(wire.Begin)
        await starting
        assert (await http.post("/hold")).status_code == 202
        await slow[0].confirm(wire.Hold)
        assert (await http.post("/hold")).status_code == 202
        await slow[1].confirm(wire.Hold)
        while (held := (await http.post("/hold")).status_code) == 202:
            pass
        assert held == 200
        assert [sum(isinstance(sent, wire.Hold) for sent in one.commands) for one in slow] == [1, 1]
        publishing = asyncio.create_task(groups.published(0))
        slow[0].channel.close()  # its confirmation is not needed any more
        await until(lambda: len(pool._connections) == 1)
        again = Slow(await joined(url))
        again.channel.send(Hello("key0", 0))  # nor that of its successor, which only begins
        tasks.append(asyncio.create_task(again.read()))
        await until(lambda: again.commands and isinstance(again.commands[-1], wire.Begin))
        assert not publishing.done()
        assert not groups._released.is_set()
        await slow[1].confirm(wire.Release)
        await publishing
        assert groups._released.is_set()
        for task in tasks:
            task.cancel()
        slow[1].channel.close()
        again.channel.close()

    asyncio.run(asyncio.wait_for(main(), 60))
