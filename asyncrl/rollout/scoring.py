"""Rewards from functions that may be slow or never return, without blocking the event loop.

A reward runs in a thread of its own, unless it declares itself quick or async (`inline`); a thread costs 0.1 ms. A
thread that does not return within the timeout cannot be killed: it is abandoned and counted, and too many of them end
the run. An async reward is cancelled.

waits for     one of THREADS concurrent calls
unblocked by  every call that returns or is abandoned
on a hang     EpisodeFailed("reward_timeout"); with MOST_HANGING abandoned threads, AsyncRLError
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError, EpisodeFailed, raised_by
from asyncrl.rewards.reward import Result, Reward, RewardInput, Score, checked
from asyncrl.schema import Trajectory

THREADS = 64
MOST_HANGING = 64


class Scorer:
    """Scores the episodes of one process."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._room = asyncio.Semaphore(THREADS)
        self.hanging = 0

    async def score(self, reward: Reward, answer: RewardInput) -> Score:
        """Score an answer. Raises EpisodeFailed with reward_error, reward_timeout, or the reason that the reward
        gives."""
        if reward.inline:
            result = _call(reward, answer)
        elif self.hanging >= MOST_HANGING:
            raise AsyncRLError(
                f"{self.hanging} calls of the reward function have not returned within {self._timeout:.0f} s "
                "(rollout.reward_timeout) and are still running: check what they wait for"
            )
        else:
            await self._room.acquire()
            result = await self._in_a_thread(reward, answer)
        if inspect.isawaitable(result):
            return await self._settled(result, answer)
        with raised_by("reward_error"):
            return checked(result, answer)

    async def _settled(self, result: Awaitable[Score | float], answer: RewardInput) -> Score:
        try:
            async with asyncio.timeout(self._timeout):
                with raised_by("reward_error"):
                    return checked(await result, answer)
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> EpisodeFailed:
        detail = f"the reward function did not return within {self._timeout:.0f} s (rollout.reward_timeout)"
        return EpisodeFailed("reward_timeout", detail, retry=False)

    def _in_a_thread(self, reward: Reward, answer: RewardInput) -> asyncio.Future[Result]:
        """Call the reward in a daemon thread: neither the loop nor the process's exit waits for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        hangs = False

        def give_up() -> None:
            nonlocal hangs
            hangs = True
            self.hanging += 1
            self._room.release()
            _unless_cancelled(future, future.set_exception, self._too_late())

        timer = loop.call_later(self._timeout, give_up)

        def ended(settle: Callable[[Any], None], value: Result | AsyncRLError) -> None:
            if hangs:
                self.hanging -= 1
            else:
                timer.cancel()
                self._room.release()
            _unless_cancelled(future, settle, value)

        def work() -> None:
            settled: tuple[Callable[[Any], None], Result | AsyncRLError]
            try:  # raised_by turns everything else, KeyboardInterrupt included, into an AsyncRLError
                settled = future.set_result, _call(reward, answer)
            except AsyncRLError as error:
                settled = future.set_exception, error
            with suppress(RuntimeError):  # the loop has been closed: nobody awaits the result
                loop.call_soon_threadsafe(ended, *settled)

        threading.Thread(target=work, name="reward", daemon=True).start()
        return future


def _call(reward: Reward, answer: RewardInput) -> Result:
    with raised_by("reward_error"):
        return reward(answer)


def _unless_cancelled(future: asyncio.Future[Result], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)


async def score_by_branch(trajectory: Trajectory, score: Callable[[Trajectory], Awaitable[Trajectory]]) -> Trajectory:
    """Score every branch and combine the results. The last turn of a branch receives the branch's reward; the rewards
    of turns are averaged over the branches that pass through them. Branches are scored one after the other, each with
    its own timeout."""
    ways = trajectory.ways()
    if len(ways) == 1:
        return await score(trajectory)
    turns, shares = list(trajectory.turns), trajectory.shares()
    for way in ways:
        alone = Trajectory([msgspec.structs.replace(trajectory.turns[place], fork=None) for place in way])
        scored = await score(alone)
        assert scored.reward is not None
        for place, before, after in zip(way, alone.turns, scored.turns, strict=True):
            more = (after.reward - before.reward) * shares[way[-1]] / shares[place]
            more += scored.reward if place == way[-1] else 0.0
            turns[place] = msgspec.structs.replace(turns[place], reward=turns[place].reward + more)
    return Trajectory(turns, 0.0)
