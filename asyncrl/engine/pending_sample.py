"""Samples that sessions wait for, and the requests that carry them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from asyncrl.engine.partial_completion import Exchange, PartialCompletion
from asyncrl.observability import intervals
from asyncrl.observability.intervals import PREFILL, Activity, Ongoing


class Listener(Protocol):
    """The session that receives a sample of a request."""

    group: str
    sample: str
    routing_key: str
    temperature: float
    closed: bool
    cached: tuple[str, int]
    activity: Activity

    def hear(self, tokens: int) -> None:
        """Count the tokens of a chunk that arrived."""
        ...


@dataclass(eq=False)
class PendingSample:
    """A pending sample of a request: its session and its exchange."""

    session: Listener
    exchange: Exchange
    hand_over: Callable[[], object] = lambda: None
    """Called as soon as the sample has ended, complete or not, so that siblings do not wait for the longest of them."""
    answered: bool = False
    doing: Ongoing | None = None

    def begin(self) -> None:
        """Record that the request is sent."""
        self.session.activity.requests += 1
        self.doing = self.session.activity.begin(PREFILL, self.exchange.role)

    def end(self, outcome: str, changed: Mapping[int, float], answer: PartialCompletion | None = None) -> None:
        """Record that the sample has ended, unless that is recorded. `changed` says when the engines got each
        version."""
        if self.doing is None:
            return
        spans = [(span.version, span.end - span.start) for span in answer.spans()] if answer else []
        queued = (answer.last.queue_time if answer and answer.last else None) or 0.0
        found = intervals.request(self.doing, time.time(), spans or [(-1, 1)], changed, queued=queued, outcome=outcome)
        self.session.activity.close(self.doing, found)
        self.doing = None


@dataclass(eq=False)
class OpenRequest:
    """One request in flight."""

    scope: asyncio.Timeout
    tokens: int  # in its prompt, and received so far
    rid: str = ""  # its name in the engine
    answered: bool = False
    overtaken: bool = False  # a publish began before its first chunk arrived
    engine: str = ""  # URL, once the router has chosen one and that has taken the request

    def routed(self, engine: str) -> None:
        """Record which engine has taken the request."""
        self.engine = engine
