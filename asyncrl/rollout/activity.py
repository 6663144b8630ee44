"""Diagnosis of running groups: what each one is waiting for, and since when.

A session records what its episode waits for (observability/intervals.py): its agent, a tool, its reward, an engine's
output, the end of a weight update. Which engine serves a group is the router's choice and is not reported here: the
group's uid is its routing key.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Protocol

NAMED = 4
"""Number of groups that a diagnosis lists."""


class SiblingActivity(Protocol):
    """One running episode of a group."""

    received: int

    @property
    def waits_for(self) -> str:
        """What it is waiting for; "" once it has ended."""
        ...

    @property
    def since(self) -> float:
        """Time of its last activity (time.monotonic)."""
        ...


def silence(siblings: Collection[SiblingActivity], now: float) -> float:
    """Return the seconds since the last activity of the episode that has been silent longest."""
    return max((now - one.since for one in siblings if one.waits_for), default=0.0)


def describe(uid: str, siblings: Collection[SiblingActivity], now: float) -> str:
    """Describe a group in one line; its slowest episode represents it."""
    left = [one for one in siblings if one.waits_for]
    so_far = f"{uid}: {len(left)} of {len(siblings)} episodes left, {sum(one.received for one in siblings)} tokens"
    if not left:
        return so_far
    slowest = min(left, key=lambda one: one.since)
    return f"{so_far}, waits {now - slowest.since:.0f} s for {slowest.waits_for}"


def slowest(groups: Iterable[tuple[str, Collection[SiblingActivity]]]) -> list[str]:
    """Return one line for each of the NAMED groups that have been silent longest."""
    now = time.monotonic()
    ranked = sorted(groups, key=lambda group: -silence(group[1], now))
    return [describe(uid, siblings, now) for uid, siblings in ranked[:NAMED]]
