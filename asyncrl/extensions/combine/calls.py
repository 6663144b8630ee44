"""Calls of several rewards for one answer, sync and async mixed.

Sync rewards are scored immediately, where the call is made (in a thread of the caller's, unless all are inline); async
ones are awaited concurrently.

waits for     the parts; their own timeouts and the caller's apply
on a failure  the first failure is raised and the other parts are cancelled
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from asyncrl.rewards.reward import Result, RewardInput, Score, checked

T = TypeVar("T")
Call = tuple[RewardInput, Callable[[], Result]]
"""An answer, and the function that scores it."""


def combined(calls: Sequence[Call], combine: Callable[[list[Score]], Score]) -> Score | Awaitable[Score]:
    """Return `combine` of all scores: immediately, or as an awaitable if any of them is async."""
    with ExitStack() as undo:
        results: list[tuple[RewardInput, Result]] = []
        for answer, call in calls:
            results.append((answer, result := call()))
            undo.callback(give_up, result)
        undo.pop_all()
    later = PendingCalls(results, combine)
    return later if any(inspect.isawaitable(result) for _, result in results) else combine(later.scores())


class PendingCalls:
    """Results of calls that are still to be awaited (once) or given up."""

    def __init__(self, results: Sequence[tuple[RewardInput, Result]], combine: Callable[[list[Score]], Score]) -> None:
        self._results, self._combine = results, combine

    def __await__(self) -> Generator[Any, None, Score]:
        return self._all().__await__()

    def scores(self) -> list[Score]:
        """Return the scores of the calls that are not async."""
        return [checked(result, answer) for answer, result in self._results if not inspect.isawaitable(result)]

    def close(self) -> None:
        """Give all results up: nobody will await them."""
        for _, result in self._results:
            give_up(result)

    async def _all(self) -> Score:
        return self._combine(await together([settled(result, answer) for answer, result in self._results]))


async def settled(result: Result, answer: RewardInput) -> Score:
    """Await a call's result and check it. Raises what the reward raises, and EpisodeFailed for a value that is not a
    score."""
    return checked(await result if inspect.isawaitable(result) else result, answer)


def give_up(result: Result) -> None:
    """Close a result that nobody will await: otherwise Python warns of a coroutine that was never awaited."""
    if closing := getattr(result, "close", None):
        closing()


async def together(waiting: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first failure cancels the others and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in waiting]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
