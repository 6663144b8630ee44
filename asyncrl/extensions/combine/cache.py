"""Cache of a reward: it is asked once for the same answer to the same question.

The key is a digest of the whole question and of all texts (asyncrl/rewards/reward.py, `pure`). A cache belongs to one
reward with its params, and evicts the least recently used scores. A caller with a key that is already being asked waits
for that result. Failures are not cached, nor are questions that cannot be encoded.

waits for     the same question of another caller: in a thread if the reward runs in one, else in the event loop
on a failure  callers that wait in the event loop fail too; those in threads ask for themselves
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Generator
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.extensions.combine.calls import give_up, settled
from asyncrl.rewards.build import part
from asyncrl.rewards.parameters import Count
from asyncrl.rewards.reward import Result, RewardInput, Score, checked, close


class CachedReward:
    """Reward that caches the scores of another."""

    def __init__(self, reward: Any, size: Count = 10_000) -> None:
        """`reward` is a pure reward, or its {"use", "params"}. `size` is the number of scores that are kept."""
        self._reward = part(reward, "reward")
        if not self._reward.pure:
            raise ConfigError("reward", reward, "It is not pure: its scores must not be cached.")
        self.inline, self.pure = self._reward.inline, True
        self._size = size
        self._kept: OrderedDict[bytes, Score] = OrderedDict()
        self._asked: dict[bytes, _Asked] = {}
        self._asked_in_threads: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()  # calls come from threads and from the event loop

    def __call__(self, answer: RewardInput) -> Result:
        """Return the cached score, or ask the reward."""
        key = identity(answer)
        if key is None:
            return self._reward(answer)
        while True:
            with self._lock:
                if (kept := self._find(key)) is not None:
                    return kept
                if (asked := self._asked_in_threads.get(key)) is None:
                    asked = self._asked_in_threads[key] = threading.Event()
                    break
            asked.wait()
        try:
            result = self._reward(answer)
            if inspect.isawaitable(result):
                return _Later(self, key, answer, result)
            return self._keep(key, checked(result, answer))
        finally:
            with self._lock:
                del self._asked_in_threads[key]
            asked.set()

    async def close(self) -> None:
        """Close the reward."""
        await close(self._reward)

    async def shared(self, key: bytes, answer: RewardInput, result: Result) -> Score:
        """Await the reward's score once, and return it to all concurrent callers of the same key."""
        with self._lock:
            kept = self._find(key)
        if kept is not None or key in self._asked:
            give_up(result)  # another caller has asked since this call was made
        if kept is not None:
            return kept
        if (asked := self._asked.get(key)) is None:
            asked = self._asked[key] = _Asked(asyncio.ensure_future(settled(result, answer)))
            asked.task.add_done_callback(lambda task: self._done(key, asked))
        asked.waiting += 1
        try:
            return _copy(await asyncio.shield(asked.task))
        finally:
            asked.waiting -= 1
            if not asked.waiting and not asked.task.done():  # nobody waits for it any more
                asked.task.cancel()
                self._forget(key, asked)

    def _done(self, key: bytes, asked: _Asked) -> None:
        self._forget(key, asked)
        if not asked.task.cancelled() and asked.task.exception() is None:
            self._keep(key, asked.task.result())

    def _forget(self, key: bytes, asked: _Asked) -> None:
        if self._asked.get(key) is asked:
            del self._asked[key]

    def _find(self, key: bytes) -> Score | None:
        if (kept := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        return _copy(kept)

    def _keep(self, key: bytes, score: Score) -> Score:
        with self._lock:
            self._kept[key] = _copy(score)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return score


class _Asked:
    """A pending question, and the number of its waiting callers."""

    def __init__(self, task: asyncio.Future[Score]) -> None:
        self.task, self.waiting = task, 0


class _Later:
    """Awaitable score; it is awaited once, or given up."""

    def __init__(self, cache: CachedReward, key: bytes, answer: RewardInput, result: Result) -> None:
        self._cache, self._key, self._answer, self._result = cache, key, answer, result

    def __await__(self) -> Generator[Any, None, Score]:
        return self._cache.shared(self._key, self._answer, self._result).__await__()

    def close(self) -> None:
        """Give the score up: nobody will await it."""
        give_up(self._result)


def identity(answer: RewardInput) -> bytes | None:
    """Return a digest of all that a pure reward may depend on, or None for a question that cannot be encoded."""
    try:
        content = msgspec.msgpack.encode((answer.question, answer.text, list(answer.texts)), order="deterministic")
    except (TypeError, OverflowError):
        return None
    return hashlib.blake2b(content, digest_size=16).digest()


def _copy(score: Score) -> Score:
    """Copy a score, because its receiver may modify it."""
    return Score(score.reward, tuple(score.turns), dict(score.parts))
