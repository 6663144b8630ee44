"""The reward interface: what a reward receives and returns, from a word counter to a fleet of judges, and how it is
called.

A fault of the scoring machinery (a judge, a reward model, a sandbox, the record of a task) raises EpisodeFailed with
the reason `judge`, `reward_model`, `sandbox` or `reward_error`: the episode is counted and replaced. A reward of 0 is a
statement about the answer, never about the machinery.

A reward runs in a thread of its own, unless it declares itself quick or async (`inline`); a thread costs 0.1 ms. A
thread that does not return within the timeout cannot be killed: it is abandoned and counted, and too many of them end
the run. An async reward is cancelled.

waits for     the reward (rollout.reward_timeout), one of THREADS concurrent calls
on a hang     EpisodeFailed with reward_timeout; with MOST_HANGING abandoned threads, AsyncRLError
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from asyncrl.errors import AsyncRLError, EpisodeFailed, raised_by
from asyncrl.schema import Trajectory, number


@dataclass(frozen=True)
class RewardInput:
    """Input of a reward: one episode."""

    text: str  # the last completion, without special tokens
    texts: Sequence[str]  # every completion in order, one per turn
    question: Mapping[str, Any]  # the task's record, with `messages`
    trajectory: Trajectory

    @property
    def record(self) -> Mapping[str, Any]:
        """The question without its messages: the row of a file, or reasoning-gym's own record."""
        return {name: value for name, value in self.question.items() if name != "messages"}

    def field(self, key: str) -> Any:
        """Return a field of the record. Raises EpisodeFailed if it is missing or null, which is not the answer's
        fault."""
        record = self.record
        if record.get(key) is None:
            what = "null in the" if key in record else "no"
            message = f"the question's record has {what} field {key!r}; its fields are {sorted(record)}"
            raise EpisodeFailed("reward_error", message)
        return record[key]

    def until(self, turn: int) -> RewardInput:
        """Return the episode as it stood when this turn, counted from 0, had been written."""
        turns = Trajectory(self.trajectory.turns[: turn + 1])
        return replace(self, text=self.texts[turn], texts=self.texts[: turn + 1], trajectory=turns)


@dataclass(frozen=True)
class Score:
    """Result of a reward. `reward` is the episode's; `turns`, one per turn or empty, are added to the rewards of its
    turns."""

    reward: float
    turns: Sequence[float] = ()
    parts: Mapping[str, float] = field(default_factory=dict)  # named components, for metrics


Result = Score | float | Awaitable[Score | float]
THREADS = 64
MOST_HANGING = 64


class Reward(Protocol):
    """Interface of a reward. It may also have `async close()`, which closes its connections and processes."""

    @property
    def inline(self) -> bool:
        """True if a call is quick and cannot hang, so that it may run in the event loop; otherwise it runs in a thread.
        An async reward is inline, because its call only creates an awaitable."""
        ...

    @property
    def pure(self) -> bool:
        """True if the same answer to the same question always gets the same score, which may then be cached."""
        ...

    def __call__(self, answer: RewardInput) -> Result:
        """Return the score. Raises EpisodeFailed when the scoring machinery is at fault, not the answer."""
        ...


def checked(value: Score | float, answer: RewardInput) -> Score:
    """Convert a result to a Score of plain finite numbers; parts that are None were not measured and are left out.
    Raises EpisodeFailed("reward_error") for anything else."""
    score = value if isinstance(value, Score) else Score(value)
    try:
        reward = number(score.reward, "the reward")
        turns = [number(one, "the reward of a turn") for one in (() if score.turns is None else score.turns)]
        parts = {
            str(name): number(part, f"part {name} of the reward")
            for name, part in (score.parts or {}).items()
            if part is not None
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise EpisodeFailed("reward_error", str(error)) from None
    if turns and len(turns) != len(answer.texts):
        detail = f"the reward function returned rewards for {len(turns)} turns, but the answer has {len(answer.texts)}"
        raise EpisodeFailed("reward_error", detail)
    return Score(reward, turns or (), parts)


async def close(reward: object) -> None:
    """Close the reward's resources, if it has any."""
    if closing := getattr(reward, "close", None):
        await closing()


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
