"""Stub of a process that plays episodes (processes.count), for scripts/bench_rollout.py: it answers every group after
DELAY seconds with random tokens, and renders prompts as the real one does. With several of them, the process with the
buffer is the busiest one, so that what it does once a second weighs little in its CPU time for each sample.

    python scripts/stub_player.py URL NUMBER TOKENS RECORD    started by `rollout_processes.measure`
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.engine.served import InUse
from asyncrl.extensions.processes import wire
from asyncrl.extensions.recording.events import compressed
from asyncrl.observability.intervals import DECODE, PREFILL, REWARD, Interval
from asyncrl.rollout.prompts import render
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan, encode
from scripts import rollout_processes

DELAY, VOCABULARY = 0.3, 49_152
GROUPS = 32
"""Number of different groups: the content of a recording's frame does not repeat, which would compress it."""


class StubPlayer:
    """Answers the commands of the rollout process."""

    def __init__(self, channel: wire.Channel, tokens: int, *, record: bool) -> None:
        self._channel, self._tokens, self._record = channel, tokens, record
        size = rollout_processes.SIZE
        self._played = cycle([[_played(tokens, number) for number in range(size)] for _ in range(GROUPS)])
        self._running: dict[str, asyncio.Task[None]] = {}
        self._received = 0
        _, self._tasks, self._template = rollout_processes.questions(2)

    async def run(self) -> None:
        """Answer until the connection ends."""
        reporting = asyncio.create_task(self._report_regularly())
        try:
            while True:
                match await self._channel.receive():
                    case wire.Play() as play:
                        self._running[play.group] = asyncio.create_task(self._play(play))
                    case wire.Render(questions):
                        self._channel.send(wire.Rendered([self._rendered(*one) for one in questions]))
                    case wire.Begin() | wire.Hold() | wire.Release() as command:
                        self._report(command.number)
        except ConnectionError:
            reporting.cancel()

    def _rendered(self, task: str, index: int) -> wire.RenderedQuestion:
        tokens = render(self._template, self._tasks[task].question(index))
        return wire.RenderedQuestion(task, index, msgspec.Raw(encode(tokens)))

    async def _play(self, play: wire.Play) -> None:
        began = time.time()
        await asyncio.sleep(DELAY)
        assert play.ticket
        group = Group(play.group, play.ticket.slot, play.token_ids, next(self._played), play.task)
        decode, now = began + 0.1 * DELAY, time.time()
        intervals = [Interval(PREFILL, began, decode), Interval(DECODE, decode, now), Interval(REWARD, now, now)]
        episodes = [wire.EndedEpisode(self._tokens, began, intervals) for _ in play.samples]
        self._received += group.num_tokens
        del self._running[play.group]
        content = compressed(group) if self._record else None
        figures = group.lengths, group.rewards, encode(group), content
        self._channel.send(wire.Finished(play.group, episodes, True, *figures))

    async def _report_regularly(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(1.0)

    def _report(self, confirms: int = 0) -> None:
        episode = wire.RunningEpisode(0, DECODE, "", 0.1)
        running = {group: [episode] * rollout_processes.SIZE for group in self._running}
        counts = wire.Counts({"training": self._received}, 0, 0, {"seconds_busy": 0.0}, {}, {}, {})
        self._channel.send(wire.Report(confirms, counts, running, InUse()))


def _played(tokens: int, number: int) -> Trajectory:
    ids, logprobs = (
        random.choices(range(VOCABULARY), k=tokens),
        (-np.random.default_rng().random(tokens, "f4")).tolist(),
    )
    turn = Turn([], Completion(ids, logprobs, [VersionSpan(0, 0, tokens)], "stop"))
    return Trajectory([turn], float(number % 2))


async def main(url: str, number: int, tokens: int, record: bool) -> None:
    """Play until the connection is closed."""
    channel = await rollout_processes.connected(url, number)
    await StubPlayer(channel, tokens, record=record).run()
    channel.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"))
