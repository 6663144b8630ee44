"""Processes that play episodes change nothing for the trainer, and one that dies costs its groups alone. The processes
are tasks of this one, with real connections between them; tests/integration/test_processes.py has real ones."""

from __future__ import annotations

import asyncio
import random
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.adapters import InUse
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.metrics.fields import STEP_PROCESSES
from asyncrl.network.addresses import Access
from asyncrl.network.ports import free_port
from asyncrl.rollout import server, wire
from asyncrl.rollout.buffer import CohortBuffer
from asyncrl.rollout.groups import GroupLifecycle
from asyncrl.rollout.parts import allow_files
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.wire import Hello, connect
from asyncrl.rollout.workers import EpisodeWorkers
from asyncrl.schema import Batch, EncodedGroup, Prompt
from tests.examples import examples
from tests.fakes import addresses, tiny_config, until
from tests.rollout.machinery import KEY, Machinery, RecordedEngine
from tests.rollout.test_machinery import STEPS, machinery, plain, same_bytes, shapes, timings


@given(timings, shapes, st.integers(2, 3))
@settings(max_examples=examples(6), deadline=None)
def test_bound_0_gives_the_same_batches_with_any_number_of_processes(timing, shape, processes: int) -> None:
    """Byte for byte."""
    found = machinery(timing, **shape, max_staleness=0, processes=processes).batches(STEPS)
    assert same_bytes([batch.groups for batch in found], plain(**shape))


def test_processes_that_die_cost_their_groups_alone_and_the_ledger_balances() -> None:
    """It is checked at every batch and version."""
    assert sum(_with_deaths(seed) for seed in range(examples(8))) > 0


def _with_deaths(seed: int) -> int:
    """Return how many groups died with their processes, of which one dies after every batch but the last."""
    chance = random.Random(seed)
    lead, slack = chance.randrange(3), chance.randrange(3)
    engine = RecordedEngine(seed, jitter=chance.choice([0, 5, 25]))
    made = Machinery(engine, batch_groups=3, group_size=2, max_staleness=lead + slack, lead=lead, processes=3)
    pool: Any = made.pool
    lost, dying = [0], list[asyncio.Task[None]]()

    async def die(number: int) -> None:
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        await made.leave(number)
        await until(lambda: number not in pool._connections)
        await made.join(number)

    def train(batch: Batch) -> None:
        assert all(0 <= age <= lead + slack for group in batch.groups for age in group.staleness(batch.version))
        lost[0] = made.groups.ledger().groups.rejected.get("process", 0)
        if batch.version < STEPS - 1:
            dying.append(asyncio.get_running_loop().create_task(die(batch.version % 3)))

    batches = made.batches(STEPS, train)
    assert all(task.cancelled() or task.result() is None for task in dying)
    told = pool.take_played()
    assert told.keys() >= STEP_PROCESSES.keys()
    assert told["processes/lost"] >= STEPS - 1
    asked = [tuple(group.prompt_ids) for batch in batches for group in batch.groups]
    assert len(set(asked)) == len(asked) == STEPS * 3
    return lost[0]


def test_groups_are_not_decoded_in_the_process_that_has_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work for a group must not grow with the length of the answers."""

    def decoded(_: EncodedGroup) -> Any:
        raise AssertionError("a group was decoded")

    monkeypatch.setattr(EncodedGroup, "group", property(decoded))
    made = Machinery(RecordedEngine(0), batch_groups=2, group_size=2, max_staleness=1, processes=2)
    assert len(made.batches(3)) == 3


def test_groups_go_to_the_process_with_the_fewest_episodes() -> None:
    made = Machinery(RecordedEngine(0), batch_groups=8, group_size=2, max_staleness=0, processes=2)
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

    made = Machinery(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    made.engine._answer = broken
    with pytest.raises(BaseExceptionGroup) as caught:
        made.batches(1)
    (error,) = caught.value.exceptions
    assert isinstance(error, AsyncRLError)
    assert "a bug in asyncrl: KeyError('ours')" in str(error)


def test_whoever_lacks_the_key_gets_nothing() -> None:
    async def main() -> None:
        pool = EpisodeWorkers(tiny_config(**{"rollout.processes": 2}), addresses(), warn)
        url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        serving = asyncio.create_task(pool.serve(Path(), url))
        await asyncio.sleep(0.05)
        starting = asyncio.create_task(pool.start())
        channel = await connect(url, Access("another"))
        channel.send(Hello("another", 0))
        with pytest.raises(ConnectionError):
            await channel.receive()
        channel.close()
        assert not pool._connections
        assert not serving.done()
        for task in (starting, serving):
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_attempts_of_an_evaluation_share_a_process_and_failed_ones_are_told() -> None:
    made = Machinery(RecordedEngine(0), batch_groups=1, group_size=1, max_staleness=0, processes=2)
    played: list[Any] = []

    async def ask() -> None:
        assert made.pool
        sessions = [
            made.pool.generate(one, group="e0", purpose="evaluation", sample=f"e {number}")
            for number, one in enumerate([0.0, 1.0])
        ]
        played.extend(await made.pool.attempts(Prompt("e", [12, 500, 11], {}, "length"), sessions))
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


def warn(text: str, traceback: str | None = None) -> None: ...


class Slow:
    """A process that confirms a command only when it is told to."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.commands = channel, list[Any]()

    async def read(self) -> None:
        while True:
            self.commands.append(await self.channel.receive())

    def confirm(self, kind: type) -> None:
        number = next(one.number for one in reversed(self.commands) if isinstance(one, kind))
        counts = wire.Counts({}, 0, 0, {"seconds_busy": 0.0}, {}, {}, {})
        self.channel.send(wire.Report(number, counts, {}, InUse([], {})))


def test_a_version_is_open_only_when_every_process_has_confirmed_hold_and_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.05)

    async def main() -> None:
        pool = EpisodeWorkers(tiny_config(**{"rollout.processes": 2}), addresses(), warn)
        groups = GroupLifecycle(CohortBuffer(1, 0), pool)  # type: ignore[arg-type]
        service = RolloutServer(groups, pool, None, "key0")  # type: ignore[arg-type]
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=service.app()), base_url="http://service", headers=KEY
        )
        url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        tasks = [asyncio.create_task(pool.serve(Path(), url))]
        await asyncio.sleep(0.05)
        slow = []
        for number in range(2):
            slow.append(Slow(await connect(url, Access("key0"))))
            slow[-1].channel.send(Hello("key0", number))
            tasks.append(asyncio.create_task(slow[-1].read()))
        await asyncio.sleep(0.05)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0.05)
        for number, one in enumerate(slow):
            assert not starting.done(), number
            one.confirm(wire.Begin)
        await starting
        assert (await http.post("/hold")).status_code == 202
        slow[0].confirm(wire.Hold)
        assert (await http.post("/hold")).status_code == 202
        slow[1].confirm(wire.Hold)
        await asyncio.sleep(0.05)
        assert (await http.post("/hold")).status_code == 200
        assert [sum(isinstance(sent, wire.Hold) for sent in one.commands) for one in slow] == [1, 1]
        publishing = asyncio.create_task(groups.published(0, 0))
        slow[0].channel.close()  # its confirmation is not needed any more
        await asyncio.sleep(0.05)
        assert not publishing.done()
        assert not groups._released.is_set()
        slow[1].confirm(wire.Release)
        await publishing
        assert groups._released.is_set()
        for task in tasks:
            task.cancel()
        slow[1].channel.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_episodes_that_need_more_open_files_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    shape = {"rollout.batch_groups": 200, "rollout.group_size": 8, "rollout.max_staleness": 0, "rollout.lead": None}
    many = {**shape, "rollout.max_running_groups": 150}
    with pytest.raises(ConfigError, match=r"rollout.max_running_groups: got 150. 150 groups of 8 need up to 1456"):
        allow_files(tiny_config(**many))
    allow_files(tiny_config(**many, **{"rollout.processes": 2}))
    allow_files(tiny_config(**{**shape, "rollout.max_running_groups": 90}))
    assert allowed == [(1024, 1024)] * 3
