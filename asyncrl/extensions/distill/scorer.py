"""Teacher scores of an episode: the teacher's log-probability of every token that the policy wrote.

They are requested when the episode has ended, concurrently with the reward.

waits for     an engine of the teacher (engines.py, which owns the deadline)
on a failure  EpisodeFailed("teacher"): the group is rejected for it, and its slot is replayed
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.errors import EngineError, EpisodeFailed
from asyncrl.extension import PlayerHooks
from asyncrl.extensions.distill.engines import TeacherEngines
from asyncrl.extensions.distill.extension import teacher_of
from asyncrl.network.addresses import Access, Addresses
from asyncrl.observability.intervals import TEACHER, spent
from asyncrl.schema import Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import Warn

REASON = "teacher"
KEY = "ASYNCRL_TEACHER_API_KEY"
"""Environment variable with the API key of engines that others started (teacher.urls): no file of the run stores it."""


def scorer(config: Config, addresses: Addresses) -> TeacherScorer:
    """Return the hooks of a process that plays episodes."""
    teacher = teacher_of(config)
    engines = TeacherEngines(
        addresses.frozen["teacher"],
        access=Access(os.environ.get(KEY, "")) if teacher.urls else addresses.access,
        max_running=teacher.max_running,
        request_timeout=teacher.request_timeout,
        retry_timeout=teacher.retry_timeout,
    )
    return TeacherScorer(engines)


class TeacherScorer(PlayerHooks):
    """Scores whole episodes: one request for each sample, however many turns it has."""

    def __init__(self, engines: TeacherEngines) -> None:
        self._engines = engines
        self._seconds, self._episodes = 0.0, 0

    async def start(self, timeout: float, warn: Warn) -> None:
        """Wait for the engines."""
        await self._engines.wait_until_ready(timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._engines.close()

    async def annotate(self, prompt: Prompt, trajectory: Trajectory, group: str) -> list[dict[str, Any]]:
        """Return the teacher's log-probabilities of each turn's completion. Siblings of a group share an engine, and
        with it the prompt's prefix cache."""
        with spent(TEACHER, ""):
            return await self._annotate(prompt.token_ids, trajectory, group)

    async def _annotate(self, prompt_ids: list[int], trajectory: Trajectory, group: str) -> list[dict[str, Any]]:
        began = time.monotonic()
        samples = [sample for sample in trajectory.samples() if any(turn.completion.token_ids for _, turn in sample)]
        try:
            async with asyncio.TaskGroup() as asking:
                tasks = [asking.create_task(self._sample(prompt_ids, [t for _, t in one], group)) for one in samples]
        except BaseExceptionGroup as raised:  # not except*, which wraps what is raised inside it before Python 3.11.4
            failed, others = raised.split(EpisodeFailed)
            if failed is None or others is not None:
                raise
            raise failed.exceptions[0] from None
        found: list[dict[str, Any]] = [{} for _ in trajectory.turns]
        for sample, task in zip(samples, tasks, strict=True):
            for (place, _), logprobs in zip(sample, task.result(), strict=True):
                found[place] = {"teacher": logprobs}
        if samples:
            self._seconds += time.monotonic() - began
            self._episodes += 1
        return found

    async def _sample(self, prompt_ids: list[int], turns: Sequence[Turn], group: str) -> list[list[float]]:
        token_ids, places = _joined(prompt_ids, turns)
        start = next(first for first, end in places if end > first)
        try:
            found = await self._engines.logprobs(token_ids, start, group)
        except EngineError as error:
            raise EpisodeFailed(REASON, str(error), retry=False) from None
        return [found[first - start : end - start] if end > first else [] for first, end in places]

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return what was counted since the last call (rollout/player.py, Sums)."""
        engines, seconds, episodes = self._engines.take_figures(), self._seconds, self._episodes
        self._seconds, self._episodes = 0.0, 0
        return {
            "teacher/tokens": (engines.tokens, 0),
            "teacher/cached": (engines.cached, engines.tokens),
            "teacher/retried": (engines.retried, 0),
            "time/teacher": (seconds, episodes),
        }


def _joined(prompt_ids: list[int], turns: Sequence[Turn]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a sample as one sequence, as the trainer sees it (algo/samples.py), and the position of each completion in
    it."""
    token_ids, places = [] if turns[0].begins else list(prompt_ids), []
    for turn in turns:
        token_ids += turn.observation
        places.append((len(token_ids), len(token_ids) + len(turn.completion.token_ids)))
        token_ids += turn.completion.token_ids
    return token_ids, places
