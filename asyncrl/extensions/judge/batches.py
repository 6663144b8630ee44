"""Batching of concurrent requests.

waits for     `max_batch` items, or `max_wait` seconds since the first of them; then the answer to the batch
unblocked by  the next item or a timer; the answer, for all items of a batch at once
on a failure  every item of the batch fails; a caller that stops waiting does not affect the others, and the last one to
              stop cancels the request
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from asyncrl.errors import EpisodeFailed

Item = TypeVar("Item")
Found = TypeVar("Found")
Batch = Sequence[tuple[Item, asyncio.Future[Found]]]


class RequestBatcher(Generic[Item, Found]):
    """Collects the items of one event loop into batches."""

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Found | EpisodeFailed]]],
        *,
        max_batch: int,
        max_wait: float,
    ) -> None:
        """`send` answers the items in order, with an EpisodeFailed for an item that fails alone, or raises for all."""
        self._send, self._max_batch, self._max_wait = send, max_batch, max_wait
        self._waiting: list[tuple[Item, asyncio.Future[Found]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Found:
        """Return the answer for this item."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Found] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait, self._flush)
        return await future

    async def close(self) -> None:
        """Stop sending and cancel all waiting callers."""
        if self._timer:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        batch = [one for one in self._waiting if not one[1].done()]
        self._waiting = []
        if not batch:
            return
        task = asyncio.get_running_loop().create_task(self._answer(batch))
        self._tasks.add(task)  # the event loop keeps only a weak reference
        task.add_done_callback(partial(self._settle, batch))
        for _, future in batch:
            future.add_done_callback(lambda _: task.cancel() if all(one.cancelled() for _, one in batch) else None)

    async def _answer(self, batch: Batch[Item, Found]) -> None:
        found = await self._send([item for item, _ in batch])
        for (_, future), one in zip(batch, found, strict=True):
            if future.done():  # nobody waits for it any more
                continue
            if isinstance(one, EpisodeFailed):
                future.set_exception(one)
            else:
                future.set_result(one)

    def _settle(self, batch: Batch[Item, Found], task: asyncio.Task[None]) -> None:
        """Pass the error on to each item that has no answer."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for _, future in batch:
            if future.done():
                continue
            if error:
                future.set_exception(error)
            else:
                future.cancel()
