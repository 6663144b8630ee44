"""Rewards from functions that may be slow, or never return, beside an event loop that must not stop.

A task's score runs in a thread of its own, unless the task says that it is quick (`inline`): a thread costs 0.1 ms. One
that does not return within the time limit cannot be ended; it is left behind and counted, and too many end the run.

waits for     room: THREADS calls at once
unblocked by  every call that returns or is given up
on a hang     EpisodeFailed("reward_timeout"); after MOST_HANGING an AsyncRLError
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncrl.errors import AsyncRLError, EpisodeFailed, raised_by
from asyncrl.tasks import Question, Task

THREADS = 64
MOST_HANGING = 64


class Scorer:
    """The scores of one process."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._room = asyncio.Semaphore(THREADS)
        self.hanging = 0

    async def score(self, task: Task, answer: str, question: Question) -> float:
        """Raises EpisodeFailed: reward_error, reward_timeout, or the reason that the task gives."""
        if getattr(task, "inline", False):
            return _score(task, answer, question)
        if self.hanging >= MOST_HANGING:
            raise AsyncRLError(
                f"{self.hanging} calls of the reward function have not returned within {self._timeout:.0f} s "
                "(rollout.reward_timeout) and still run: what do they wait for?"
            )
        await self._room.acquire()
        return await self._in_a_thread(task, answer, question)

    def _in_a_thread(self, task: Task, answer: str, question: Question) -> asyncio.Future[float]:
        """A daemon: neither the loop nor the end of the process waits for it."""
        loop = asyncio.get_running_loop()
        reward: asyncio.Future[float] = loop.create_future()
        hangs = False

        def give_up() -> None:
            nonlocal hangs
            hangs = True
            self.hanging += 1
            self._room.release()
            detail = f"no reward for {self._timeout:.0f} s (rollout.reward_timeout)"
            _unless_cancelled(reward, reward.set_exception, EpisodeFailed("reward_timeout", detail, retry=False))

        timer = loop.call_later(self._timeout, give_up)

        def ended(settle: Callable[[Any], None], value: float | AsyncRLError) -> None:
            if hangs:
                self.hanging -= 1
            else:
                timer.cancel()
                self._room.release()
            _unless_cancelled(reward, settle, value)

        def work() -> None:
            settled: tuple[Callable[[Any], None], float | AsyncRLError]
            try:
                settled = reward.set_result, _score(task, answer, question)
            except AsyncRLError as error:
                settled = reward.set_exception, error
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody listens
                loop.call_soon_threadsafe(ended, *settled)

        threading.Thread(target=work, name="reward", daemon=True).start()
        return reward


def _score(task: Task, answer: str, question: Question) -> float:
    with raised_by("reward_error"):
        reward = float(task.score(answer, question))
    if not math.isfinite(reward):
        raise EpisodeFailed("reward_error", f"the reward is {reward}", retry=False)
    return reward


def _unless_cancelled(future: asyncio.Future[float], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)
