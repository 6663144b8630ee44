"""Several rewards asked for one answer, whichever of them are sync and async.

What is sync is scored at once, where the call is made (in a thread of the caller's, unless all are inline); what is
left is awaited together.

waits for     the parts; how long is theirs to say, and the caller's
on a failure  whoever fails first is heard, the others are ended
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from asyncrl.rewards.reward import Answer, Result, Score, checked

T = TypeVar("T")
Call = tuple[Answer, Callable[[], Result]]
"""What is scored, and what scores it."""


def combined(calls: Sequence[Call], combine: Callable[[list[Score]], Score]) -> Score | Awaitable[Score]:
    """What `combine` makes of all the scores: now, or once those that are async are there."""
    with ExitStack() as undo:
        results: list[tuple[Answer, Result]] = []
        for answer, call in calls:
            results.append((answer, result := call()))
            undo.callback(give_up, result)
        undo.pop_all()
    later = Later(results, combine)
    return later if any(inspect.isawaitable(result) for _, result in results) else combine(later.scores())


class Later:
    """The scores of calls that were made and have yet to be awaited, once; or to be given up."""

    def __init__(self, results: Sequence[tuple[Answer, Result]], combine: Callable[[list[Score]], Score]) -> None:
        self._results, self._combine = results, combine

    def __await__(self) -> Generator[Any, None, Score]:
        return self._all().__await__()

    def scores(self) -> list[Score]:
        """Where none is async."""
        return [checked(result, answer) for answer, result in self._results if not inspect.isawaitable(result)]

    def close(self) -> None:
        """Nobody will await it."""
        for _, result in self._results:
            give_up(result)

    async def _all(self) -> Score:
        return self._combine(await together([settled(result, answer) for answer, result in self._results]))


async def settled(result: Result, answer: Answer) -> Score:
    """A call's result, once it is there. Raises what the reward raises, and EpisodeFailed for what is no score."""
    return checked(await result if inspect.isawaitable(result) else result, answer)


def give_up(result: Result) -> None:
    """Of a call whose result nobody will await: else Python warns that a coroutine was not."""
    if closing := getattr(result, "close", None):
        closing()


async def together(waiting: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure ends the others, and is raised as it is."""
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
