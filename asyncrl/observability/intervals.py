"""The one instrument in the rollout process's hot path: an episode's `Activity` says what it does now, and keeps what
it did. Timelines, spans, metrics and diagnosis are all made of it.

    recorded    what engines, tools, environments, rewards and the teacher do for the episode
    in between  the agent's own time, which nothing has to record
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise

import msgspec

QUEUED = "queued"
PREFILL = "prefill"
DECODE = "decode"
RETRY = "retry"
AGENT = "agent"
TOOL = "tool"
ENVIRONMENT = "environment"
REWARD = "reward"
TEACHER = "teacher"
WAITING = "waiting"
PHASES = (QUEUED, PREFILL, DECODE, RETRY, AGENT, TOOL, ENVIRONMENT, REWARD, TEACHER, WAITING)
PUBLISH, ENGINE = "publish", "engine"
"""Names of QUEUED intervals: requests are held back for a publish, or wait in an engine; otherwise an environment."""
SHORTEST = 0.001
"""Gaps between intervals that are shorter, in seconds, are not the agent's."""
LONGEST = 200
"""Maximum length of a name or an outcome."""
_WAITS_FOR = {
    QUEUED: "a place in {name}",
    PREFILL: "the first chunk of an engine",
    DECODE: "the next chunk of an engine",
    RETRY: "another attempt ({name})",
    TOOL: "its tool {name}",
    ENVIRONMENT: "its environment {name}",
    REWARD: "its reward",
    TEACHER: "its teacher",
}


def waits_for(phase: str, name: str) -> str:
    """Say what an episode in this phase is waiting for."""
    return "the end of a publish" if name == PUBLISH else _WAITS_FOR[phase].format(name=name)


class Interval(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of an episode's time. Intervals of one episode nest (a tool's is inside of its environment's), and
    overlap where the agent makes several requests or calls several tools at once."""

    phase: str  # of PHASES
    start: float
    end: float
    name: str = ""  # of the tool, environment, task or role; the reason of a retry; what it is queued for
    version: int = -1  # of the weights that generated; DECODE has one interval for each version
    outcome: str = ""  # the error, if there was one

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


class Ongoing(msgspec.Struct, eq=False, gc=False):
    """An interval that has not ended. A request's begins as PREFILL and becomes DECODE with its first token."""

    phase: str
    start: float
    name: str
    first: float = 0.0  # when the first token of a request arrived


class Activity:
    """What an episode does."""

    __slots__ = ("began", "closed", "ended", "open", "requests", "since")

    def __init__(self) -> None:
        self.began, self.ended, self.since = time.time(), 0.0, time.monotonic()
        self.requests = 0
        """Requests sent so far; the number of a request in its episode is part of its span's id."""
        self.closed: list[Interval] = []
        self.open: list[Ongoing] = []

    @property
    def waits_for(self) -> str:
        """What the episode is waiting for; "" once it has ended."""
        if self.open:
            return waits_for(self.open[-1].phase, self.open[-1].name)
        return "" if self.ended else "its agent"

    @property
    def phase(self) -> str:
        """What the episode does now."""
        return self.open[-1].phase if self.open else WAITING if self.ended else AGENT

    def begin(self, phase: str, name: str = "") -> Ongoing:
        """Begin an interval."""
        one = Ongoing(phase, time.time(), text(name))
        self.open.append(one)
        self.since = time.monotonic()
        return one

    def end(self, one: Ongoing, outcome: str = "") -> None:
        """End an interval."""
        self.close(one, [Interval(one.phase, one.start, time.time(), one.name, -1, outcome)])

    def close(self, one: Ongoing, intervals: Sequence[Interval]) -> None:
        """Replace an open interval by what it turned out to be."""
        self.open.remove(one)
        self.closed += intervals
        self.since = time.monotonic()

    def heard(self, one: Ongoing) -> None:
        """Record the first token of a request."""
        one.phase, one.first = DECODE, time.time()

    def spent(self, phase: str, name: str = "") -> Spent:
        """Return a context whose duration is an interval."""
        return Spent(self, phase, name)

    def finish(self) -> None:
        """Record the end of the episode; only the first call counts."""
        self.ended = self.ended or time.time()

    def intervals(self, until: float) -> list[Interval]:
        """Return all intervals by their start, with those that are open, the agent's time in the gaps, and the wait
        from the end of the episode until then."""
        found = list(self.closed)
        for one in self.open:
            found += request(one, until) if one.first else [Interval(one.phase, one.start, until, one.name)]
        found.sort(key=_start)
        covered, end, gaps = self.began, self.ended or until, []
        for interval in found:
            if interval.start - covered > SHORTEST:
                gaps.append(Interval(AGENT, covered, interval.start))
            covered = max(covered, interval.end)
        if end - covered > SHORTEST:
            gaps.append(Interval(AGENT, covered, end))
        if until - end > SHORTEST:
            gaps.append(Interval(WAITING, end, until))
        return sorted(found + gaps, key=_start) if gaps else found


class Spent:
    """Context whose duration is an interval of an activity, with the error that ended it."""

    __slots__ = ("_activity", "_name", "_one", "_phase")

    def __init__(self, activity: Activity | None, phase: str, name: str) -> None:
        self._activity, self._phase, self._name = activity, phase, name

    def __enter__(self) -> None:
        if self._activity is not None:
            self._one = self._activity.begin(self._phase, self._name)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._activity is not None:
            self._activity.end(self._one, outcome(error))


CURRENT: ContextVar[Activity | None] = ContextVar("activity", default=None)
"""The activity of the episode in whose task the code runs, for tools and environments, which know no episode."""


def spent(phase: str, name: str) -> Spent:
    """Return a context whose duration is an interval of the current episode, if there is one."""
    return Spent(CURRENT.get(), phase, name)


def outcome(error: BaseException | None) -> str:
    """Return an error as the outcome of an interval."""
    if error is None:
        return ""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return text(str(error) or type(error).__name__)


def text(value: str) -> str:
    """Return a text that can be written: it is not too long, and has no surrogates, which a tool may have put there."""
    value = value if len(value) <= LONGEST else value[:LONGEST]
    return value if value.isascii() else value.encode(errors="replace").decode()


def request(
    one: Ongoing,
    end: float,
    spans: Sequence[tuple[int, int]] = ((-1, 1),),
    changed: Mapping[int, float] | None = None,
    *,
    queued: float = 0.0,
    outcome: str = "",
) -> list[Interval]:
    """Return the intervals of a request that ended.

    spans: version and number of its tokens, in order
    changed: when the engines got each version
    queued: seconds that it waited in its engine
    """
    first, outcome = one.first or end, text(outcome)
    begun = min(one.start + queued, first)
    found = [Interval(QUEUED, one.start, begun, ENGINE)] if queued else []
    found.append(Interval(PREFILL, begun, first, one.name, -1, "" if one.first else outcome))
    if one.first:
        bounds = [*_bounds(first, end, spans, changed or {}), end]
        for number, (version, _) in enumerate(spans, 1):
            last = outcome if number == len(spans) else ""
            found.append(Interval(DECODE, bounds[number - 1], bounds[number], one.name, version, last))
    return found


def _bounds(
    first: float, end: float, spans: Sequence[tuple[int, int]], changed: Mapping[int, float]
) -> Sequence[float]:
    """Return when the tokens of each version began: when the engines got it, or else in proportion to the tokens."""
    if len(spans) == 1:
        return (first,)
    bounds, tokens, total = [first], 0, max(1, sum(count for _, count in spans))
    for (_, count), (version, _) in pairwise(spans):
        tokens += count
        bounds.append(min(end, max(bounds[-1], changed.get(version, first + (end - first) * tokens / total))))
    return bounds


def _start(interval: Interval) -> float:
    return interval.start
