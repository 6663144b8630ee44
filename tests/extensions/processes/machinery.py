"""The machinery of tests/rollout with several processes that play. They are tasks of this one, with real connections
between them; each has a client of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.extensions.processes.episodes import EpisodeWorker, play_until_closed
from asyncrl.extensions.processes.wire import Channel, Hello, connect
from asyncrl.extensions.processes.workers import EpisodeWorkers
from asyncrl.network.addresses import Access
from asyncrl.network.ports import free_port
from asyncrl.rollout.player import GroupPlayer, PlaysGroups
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.schema import Batch
from tests.fakes import addresses, tiny_config, until
from tests.rollout.machinery import Machinery, RecordedEngine


def warn(text: str, traceback: str | None = None) -> None:
    """Receive a warning."""


def pool_of(count: int) -> tuple[EpisodeWorkers, str]:
    """Return what plays in so many processes, and where it waits for them."""
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    config = tiny_config(**{"processes.count": count, "rollout.temperature": 1.0})
    run = RolloutRun(config, addresses(extensions={"processes": {"url": url}}), Path(), warn)
    return EpisodeWorkers(run, count), url


class ManyProcesses(Machinery):
    """The rollout side with several processes."""

    def __init__(self, engine: RecordedEngine, processes: int = 2, **settings: Any) -> None:
        self.processes = processes
        self.pool, self.url = pool_of(processes)
        self.joined: dict[int, tuple[Channel, asyncio.Task[None]]] = {}
        self.question: Callable[[str, int], dict[str, Any]] = lambda task, index: {"index": index}
        self.render: Callable[[dict[str, Any]], list[int]] = lambda question: [12, question["index"], 11]
        super().__init__(engine, **settings)

    def seen_client(self) -> Any:
        """Return the pool."""
        return self.pool

    def plays(self, here: GroupPlayer) -> PlaysGroups:
        """Return the pool."""
        return self.pool

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Let all processes connect."""
        self._serving = group.create_task(self.pool.serve())
        for number in range(self.processes):
            await self.join(number)
        await self.pool.start()

    def stop(self) -> None:
        """Take no more processes."""
        self._serving.cancel()

    async def end(self) -> None:
        """Let all processes end."""
        for number in list(self.joined):
            await self.leave(number)

    async def join(self, number: int) -> None:
        """Let a process connect to the buffer's."""
        while True:
            try:
                channel = await connect(self.url, Access("key0"))
                break
            except OSError:
                await asyncio.sleep(0)
        channel.send(Hello("key0", number))
        worker = EpisodeWorker(channel, self.new_parts(), self.question, self.render, record=False)
        playing = asyncio.create_task(play_until_closed(channel, worker))
        playing.add_done_callback(lambda task: task.cancelled() or task.exception())  # the other end raises it
        self.joined[number] = channel, playing

    async def leave(self, number: int) -> None:
        """Let a process die: its connection ends, and so does everything that it did."""
        channel, playing = self.joined.pop(number)
        channel.close()
        playing.cancel()
        await asyncio.wait([playing])


class Deaths:
    """Processes that die after batches, and are started again."""

    def __init__(self, made: ManyProcesses, chance: random.Random, end: int) -> None:
        """None dies after the last batch before step `end`."""
        self.made, self._chance, self._end, self._tasks = made, chance, end, list[asyncio.Task[None]]()
        self._pool: Any = made.pool
        self._pool.most_losses = 10**6

    def after(self, batch: Batch) -> None:
        """Let one die soon after this batch."""
        if batch.version < self._end - 1:
            self.begin(batch.version % self.made.processes)

    def begin(self, number: int) -> None:
        """Let this one die soon."""
        self._tasks.append(asyncio.get_running_loop().create_task(self._die(number)))

    async def _die(self, number: int) -> None:
        for _ in range(self._chance.randrange(40)):
            await asyncio.sleep(0)
        if number in self.made.joined:
            await self.made.leave(number)
            await until(lambda: number not in self._pool._connections)
            await self.made.join(number)

    def told(self) -> dict[str, float]:
        """Return the figures of the processes, after the run."""
        assert all(task.cancelled() or task.result() is None for task in self._tasks)
        told: dict[str, float] = self._pool.take_played()
        return told
