"""A worker on a real service and buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.engine.session import GenerationSession
from asyncrl.extension import RolloutHooks
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.hooks import accept_all
from asyncrl.rollout.ledger import Ledger
from asyncrl.rollout.player import GroupPlayer
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.rollout.snapshot import ResumableBuffer, ResumableGroups
from asyncrl.rollout.worker import Worker
from asyncrl.schema import Prompt
from asyncrl.tasks.scores import TaskScoreReward
from tests.fakes import FakeClient, FakeTemplate, LengthTask, completion, in_turn, until

LIMITS = EpisodeTimeouts(agent=60.0, reward=60.0, episode=None)


class Site:
    """A worker on a real service and buffer."""

    def __init__(
        self,
        agent: Any = None,
        *,
        bound: int = 1,
        batch_groups: int = 2,
        waste: int = 0,
        buffer: dict[str, Any] | None = None,
        draw: Callable[[int], Prompt] | None = None,
        listeners: Sequence[RolloutHooks] = (),
        **settings: Any,
    ) -> None:
        self.buffer = ResumableBuffer(batch_groups, bound, **(buffer or {}))
        self.client: Any = FakeClient(lambda ids: completion(tokens=ids[1] % 3 + 1), waste)

        groups = ResumableGroups(self.buffer, self.client, hooks=listeners)
        self.told: list[tuple[str, str | None]] = []
        sizes = {"length": 3, "long": 5}
        failures = FailureReporter(lambda text, trace: self.told.append((text, trace)))
        of_player = {name: settings.pop(name) for name in ("retries", "hooks") if name in settings}
        tasks = {"length": LengthTask(), "long": LengthTask(worth=10.0)}
        self.draw = draw or in_turn("length")
        self.player = GroupPlayer(
            dict.fromkeys(tasks, agent or SingleTurn()),
            {name: TaskScoreReward(task) for name, task in tasks.items()},
            FakeTemplate(lambda ids: "x" * len(ids)),
            settings.pop("limits", LIMITS),
            failures,
            accept=settings.pop("accept", accept_all),
            **of_player,
        )
        self.worker = Worker(
            groups,
            self.client,
            self.player,
            self.draw,
            settings.pop("limiter", ConcurrencyLimiter()),
            group_sizes=settings.pop("group_sizes", sizes),
            max_failures=settings.pop("max_failures", 100),
            max_rejections=settings.pop("max_rejections", 1000),
            **settings,
        )

    def ledger(self) -> Ledger:
        return self.worker._groups.ledger()

    def outstanding(self) -> Sequence[tuple[Ticket, Prompt, Sequence[GenerationSession]]]:
        """Let all groups run that are admitted now, as after a resume."""
        groups, found = self.worker._groups, []
        while ticket := self.buffer.admit():
            prompt = groups.draw(lambda: self.draw(ticket.born))
            sessions = [self.client.generate(born=ticket.born) for _ in range(3)]
            groups.begin(ticket, prompt, sessions)
            found.append((ticket, prompt, sessions))
        return found

    async def run_until(
        self,
        condition: Callable[[], object],
        outstanding: Sequence[tuple[Ticket, Prompt, Sequence[GenerationSession]]] = (),
    ) -> None:
        running = asyncio.create_task(self.worker.run(outstanding))
        try:
            await until(lambda: running.done() or condition())
            if running.done():
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def started(limiter: ConcurrencyLimiter, count: int, size: int = 4) -> list[asyncio.Task[None]]:
    """So many groups want to start."""
    tasks = [asyncio.ensure_future(limiter.acquire(size)) for _ in range(count)]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() for task in tasks)
