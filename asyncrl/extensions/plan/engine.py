"""A model of an engine with a few parameters: every request in the batch decodes one token per step, and a step takes
longer in a larger batch. It is exact in virtual time and independent of the clock; both the simulation and the
time-dilated stub engine use it.

    step(b) = per_token + per_request * b      seconds, b requests in the batch
    full cache      the request with the fewest tokens returns to the queue and is prefilled again (SGLang's retraction)
    prefill         decoding stops meanwhile; tokens found in the prefix cache cost nothing
    prefix cache    holds what requests leave behind; the least recently used entry is evicted first
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

ROOM_STEPS = 20
"""When the cache is full, requests are retracted until each remaining one can decode this many more tokens (SGLang's
retract_decode_steps)."""


@dataclass(frozen=True)
class EngineShape:
    """Parameters of an engine, measured or assumed."""

    per_token: float = 0.012
    """Base time of a decode step in seconds, for an empty batch."""
    per_request: float = 0.00012
    """Additional seconds per request in the batch."""
    max_running: int = 256
    """Maximum number of requests in the batch."""
    kv_tokens: float = math.inf
    """Capacity of the KV cache in tokens."""
    prefill_rate: float = math.inf
    """Prefill throughput in tokens per second."""

    def rate(self, running: float) -> float:
        """Return the decode throughput of the whole batch in tokens per second."""
        return running / (self.per_token + self.per_request * running)


@dataclass(eq=False)
class SimulatedRequest:
    """A request that generates `tokens` tokens after a context of `context` tokens and is reported every `interval`
    tokens."""

    tokens: float
    context: float = 0.0
    prefix: tuple[Hashable, float] | None = None
    """Part of the context shared with other requests: its key and its number of tokens."""
    session: Hashable = None
    """Key under which the prefix cache keeps this request's context for a later request that continues it."""
    interval: float = math.inf
    done: float = 0.0
    """Number of tokens generated when it was last reported."""
    began: Callable[[], None] | None = None
    """Called when the request enters the batch for the first time."""
    _start: float = 0.0  # virtual time of its first token
    _mark: float = 0.0  # number of tokens at its next report
    _serial: int = 0  # serial of its current event; older events are stale

    @property
    def finished(self) -> bool:
        """Return whether all its tokens are generated."""
        return self.done >= self.tokens


class SimulatedEngine:
    """An engine without a clock of its own: the caller submits requests and calls `advance` at every `next_time`."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.now = 0.0
        self.retractions = 0
        self.prefilled = self.decoded = 0.0  # tokens
        self.prefill_seconds = 0.0
        self._virtual = 0.0  # virtual time: the tokens of a request that has been running from the start
        self._held = 0.0  # running requests hold _held + n * _virtual tokens
        self._stands_until = 0.0
        self._paused = False
        self._running: dict[SimulatedRequest, None] = {}
        self._queue: deque[SimulatedRequest] = deque()
        self._events: list[tuple[float, int, SimulatedRequest]] = []  # (virtual time, serial, job)
        self._serial = itertools.count(1)
        self._cache: OrderedDict[Hashable, float] = OrderedDict()
        self._cached = 0.0  # tokens in it

    # -- figures -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Return the number of requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._queue)

    @property
    def used(self) -> float:
        """Return the number of tokens that running requests hold in the cache."""
        return self._held + len(self._running) * self._virtual

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, job: SimulatedRequest, now: float) -> None:
        """Add a request to the queue."""
        self._move(now)
        self._queue.append(job)
        self._fill()

    def abort(self, job: SimulatedRequest, now: float) -> None:
        """Remove a request from the batch or the queue, and store its number of tokens in `done`."""
        self._move(now)
        if job in self._running:
            job.done = self._virtual - job._start
            self._leave(job)
        elif job in self._queue:
            self._queue.remove(job)
        self._fill()

    def written(self, job: SimulatedRequest, now: float) -> float:
        """Return the number of tokens that a request has generated, reported or not."""
        self._move(now)
        return self._virtual - job._start if job in self._running else job.done

    def retract(self, now: float) -> None:
        """Return every request to the queue, to be prefilled again, and clear the prefix cache."""
        self._move(now)
        self._cache.clear()
        self._cached = 0.0
        for job in sorted(self._running, key=lambda one: one._start, reverse=True):
            self._put_back(job)
        self._fill()

    def pause(self, now: float) -> None:
        """Stop decoding until `resume`."""
        self._move(now)
        self._paused = True

    def resume(self, now: float) -> None:
        """Continue decoding."""
        self._move(now)
        self._paused = False

    def next_time(self) -> float:
        """Return the time at which `advance` is due; infinity if no event is pending."""
        self._drop_stale()
        if self._paused or not self._running:
            return math.inf
        steps = min(self._events[0][0], self._full_at()) - self._virtual
        return max(self.now, self._stands_until) + max(0.0, steps) * self._step()

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Advance to `now`. Return the requests to report, with `done` updated; finished ones have left the batch."""
        seen: dict[SimulatedRequest, None] = {}
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

    # -- internals -----------------------------------------------------------------------------------------

    def _step(self) -> float:
        return self.shape.per_token + self.shape.per_request * len(self._running)

    def _move(self, now: float) -> None:
        """Advance the time over a period without events."""
        if not self._paused and self._running:
            steps = max(0.0, now - max(self.now, self._stands_until)) / self._step()
            self._virtual += steps
            self.decoded += steps * len(self._running)
        self.now = max(self.now, now)

    def _full_at(self) -> float:
        """Return the virtual time at which the cache is full; infinity for a single request, which is never
        retracted."""
        if len(self._running) < 2:  # a single request is never retracted
            return math.inf
        return (self.shape.kv_tokens - self._held) / len(self._running)

    def _fill(self) -> None:
        """Move requests from the queue to the batch while there is room."""
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

    def _prefill(self, job: SimulatedRequest, size: float) -> None:
        found = self._cache.get(job.session, 0.0)
        if job.session in self._cache:
            self._cached -= self._cache.pop(job.session)  # now held by the running request
        if job.prefix:
            name, tokens = job.prefix
            found = max(found, self._cache.get(name, 0.0))
            self._keep(name, tokens)
        missing = max(0.0, size - found)
        self.prefilled += missing
        self.prefill_seconds += missing / self.shape.prefill_rate
        self._stands_until = max(self.now, self._stands_until) + missing / self.shape.prefill_rate

    def _expect(self, job: SimulatedRequest) -> None:
        job._serial = next(self._serial)
        job._mark = min(job.tokens, (math.floor(job.done / job.interval) + 1) * job.interval)
        heapq.heappush(self._events, (job._start + job._mark, job._serial, job))

    def _drop_stale(self) -> None:
        while self._events and self._events[0][1] != self._events[0][2]._serial:
            heapq.heappop(self._events)

    def _leave(self, job: SimulatedRequest) -> None:
        """Remove a request from the batch; its tokens stay in the prefix cache if it has a session."""
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

    def _put_back(self, job: SimulatedRequest) -> None:
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
