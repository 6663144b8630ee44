"""An engine as a few numbers: every request in its batch decodes one token a step, and a step takes longer in a larger
batch. Exact in virtual time, whatever the clock: the simulation drives it, and the time-dilated stub engine.

    step(b) = per_token + per_request * b      seconds, b requests in the batch
    full cache      the request with the fewest tokens goes back to the queue, to be prefilled anew (as SGLang retracts)
    prefill         decoding stands still meanwhile; what lies in the prefix cache costs nothing
    prefix cache    what requests leave behind, the least recently used goes first
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

ROOM_STEPS = 20
"""A full cache is cleared until every request can write this many tokens more (SGLang's retract_decode_steps)."""


@dataclass(frozen=True)
class EngineShape:
    """Measured, or made up."""

    per_token: float = 0.012
    """Seconds of a decode step in an empty batch."""
    per_request: float = 0.00012
    """Seconds that each request adds to it."""
    max_running: int = 256
    """Requests in the batch."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds."""
    prefill_rate: float = math.inf
    """Tokens per second."""

    def rate(self, running: int) -> float:
        """Tokens per second of the whole batch."""
        return running / (self.per_token + self.per_request * running)


@dataclass(eq=False)
class Job:
    """A request: `tokens` to write after `context` tokens, seen every `interval` tokens."""

    tokens: float
    context: float = 0.0
    prefix: tuple[Hashable, float] | None = None
    """A part of the context that others share: its name, and its tokens."""
    session: Hashable = None
    """What a later request may continue: its context is found in the cache under this name."""
    interval: float = math.inf
    done: float = 0.0
    """Tokens that were written when it was last seen."""
    began: Callable[[], None] | None = None
    """Called when it enters the batch for the first time."""
    _start: float = 0.0  # virtual time at which its first token would have been written
    _mark: float = 0.0  # tokens at which it is seen next
    _serial: int = 0  # of its entry among the events

    @property
    def finished(self) -> bool:
        """Whether it has been written."""
        return self.done >= self.tokens


class SimulatedEngine:
    """Driven by whoever has a clock: `submit`, then `advance` at every `next_time`."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.now = 0.0
        self.retractions = 0
        self.prefilled = self.decoded = 0.0  # tokens
        self.prefill_seconds = 0.0
        self._virtual = 0.0  # tokens that a request would have written that was there all the time
        self._held = 0.0  # what running requests hold is _held + n * _virtual tokens
        self._stands_until = 0.0
        self._paused = False
        self._running: dict[Job, None] = {}
        self._queue: deque[Job] = deque()
        self._events: list[tuple[float, int, Job]] = []  # (virtual time, serial, job)
        self._serial = itertools.count(1)
        self._cache: OrderedDict[Hashable, float] = OrderedDict()
        self._cached = 0.0  # tokens in it

    # -- figures -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def used(self) -> float:
        """Tokens that running requests hold in the cache."""
        return self._held + len(self._running) * self._virtual

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """A request arrives."""
        self._move(now)
        self._queue.append(job)
        self._fill()

    def abort(self, job: Job, now: float) -> None:
        """A request goes, wherever it is; `done` says how many tokens it has."""
        self._move(now)
        if job in self._running:
            job.done = self._virtual - job._start
            self._leave(job)
        elif job in self._queue:
            self._queue.remove(job)
        self._fill()

    def written(self, job: Job, now: float) -> float:
        """Tokens of a request, seen or not."""
        self._move(now)
        return self._virtual - job._start if job in self._running else job.done

    def retract(self, now: float) -> None:
        """Every request goes back to the queue, to be prefilled anew; what lies in the prefix cache is forgotten."""
        self._move(now)
        self._cache.clear()
        self._cached = 0.0
        for job in sorted(self._running, key=lambda one: one._start, reverse=True):
            self._put_back(job)
        self._fill()

    def pause(self, now: float) -> None:
        """Decoding stands still until `resume`."""
        self._move(now)
        self._paused = True

    def resume(self, now: float) -> None:
        """Decoding goes on."""
        self._move(now)
        self._paused = False

    def next_time(self) -> float:
        """When `advance` is due; infinite while nothing will happen by itself."""
        self._drop_stale()
        if self._paused or not self._running:
            return math.inf
        steps = min(self._events[0][0], self._full_at()) - self._virtual
        return max(self.now, self._stands_until) + max(0.0, steps) * self._step()

    def advance(self, now: float) -> list[Job]:
        """Requests that are to be seen at `now`, with `done` brought up to date; those that are finished have left."""
        seen: dict[Job, None] = {}
        while self.next_time() <= now:
            self._move(self.next_time())
            self._drop_stale()
            at = self._events[0][0]
            if at > self._full_at():
                self._retract()
                continue
            self._virtual = max(self._virtual, at)
            job = heapq.heappop(self._events)[2]
            job.done = job._mark
            seen[job] = None
            if job.finished:
                self._leave(job)
                self._fill()
            else:
                self._expect(job)
        self._move(now)
        return list(seen)

    # -- within --------------------------------------------------------------------------------------------

    def _step(self) -> float:
        return self.shape.per_token + self.shape.per_request * len(self._running)

    def _move(self, now: float) -> None:
        """Let time pass in which nothing happens."""
        if not self._paused and self._running:
            steps = max(0.0, now - max(self.now, self._stands_until)) / self._step()
            self._virtual += steps
            self.decoded += steps * len(self._running)
        self.now = max(self.now, now)

    def _full_at(self) -> float:
        """The virtual time at which the cache is full."""
        if len(self._running) < 2:  # a single request is let be
            return math.inf
        return (self.shape.kv_tokens - self._held) / len(self._running)

    def _fill(self) -> None:
        """Take requests from the queue while there is room."""
        while self._queue and len(self._running) < self.shape.max_running:
            job = self._queue[0]
            size = job.context + job.done
            room = self.shape.kv_tokens - self.used - ROOM_STEPS * len(self._running)
            if self._running and size + ROOM_STEPS > room:
                return
            self._queue.popleft()
            self._prefill(job, size)
            job._start = self._virtual - job.done
            self._held += size - self._virtual
            self._running[job] = None
            if job.began:
                job.began()
                job.began = None
            self._expect(job)
            self._evict()

    def _prefill(self, job: Job, size: float) -> None:
        found = self._cache.get(job.session, 0.0)
        if job.session in self._cache:
            self._cached -= self._cache.pop(job.session)  # it is the running request's now
        if job.prefix:
            name, tokens = job.prefix
            found = max(found, self._cache.get(name, 0.0))
            self._keep(name, tokens)
        missing = max(0.0, size - found)
        self.prefilled += missing
        self.prefill_seconds += missing / self.shape.prefill_rate
        self._stands_until = max(self.now, self._stands_until) + missing / self.shape.prefill_rate

    def _expect(self, job: Job) -> None:
        job._serial = next(self._serial)
        job._mark = min(job.tokens, (math.floor(job.done / job.interval) + 1) * job.interval)
        heapq.heappush(self._events, (job._start + job._mark, job._serial, job))

    def _drop_stale(self) -> None:
        while self._events and self._events[0][1] != self._events[0][2]._serial:
            heapq.heappop(self._events)

    def _leave(self, job: Job) -> None:
        """Out of the batch; what it held stays in the prefix cache."""
        del self._running[job]
        job._serial = 0
        self._held -= job.context - job._start
        if job.session is not None:
            self._keep(job.session, job.context + job.done)
            self._evict()

    def _retract(self) -> None:
        while len(self._running) > 1 and self.shape.kv_tokens - self.used < ROOM_STEPS * len(self._running):
            self._put_back(max(self._running, key=lambda one: one._start))
            self.retractions += 1

    def _put_back(self, job: Job) -> None:
        job.done = self._virtual - job._start
        del self._running[job]
        job._serial = 0
        self._held -= job.context - job._start
        self._queue.appendleft(job)

    def _keep(self, name: Hashable, tokens: float) -> None:
        self._cached += tokens - self._cache.pop(name, 0.0)
        self._cache[name] = tokens

    def _evict(self) -> None:
        while self._cache and self._cached + self.used > self.shape.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
