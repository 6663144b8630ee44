"""What groups that are being played wait for, since when: for whoever waits for them.

A session says what its episode waits for (engine/client.py): its agent, its reward, an engine's pieces, the end of a
publish. Which engine answers is the router's choice, of which neither tells: a group's uid is its routing key.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Protocol

AGENT, REWARD, TEACHER, NOTHING = "its agent", "its reward", "its teacher", ""
"""What a session waits for between its requests; NOTHING once its episode has ended."""
NAMED = 4
"""Groups that a diagnosis names."""


class Sibling(Protocol):
    """One episode under way."""

    received: int
    waits_for: str
    since: float


def silence(siblings: Collection[Sibling], now: float) -> float:
    """Seconds since the last sign of life of the episode that has been silent longest."""
    return max((now - one.since for one in siblings if one.waits_for), default=0.0)


def describe(uid: str, siblings: Collection[Sibling], now: float) -> str:
    """One line for one group: its slowest episode stands for it."""
    left = [one for one in siblings if one.waits_for]
    so_far = f"{uid}: {len(left)} of {len(siblings)} episodes left, {sum(one.received for one in siblings)} tokens"
    if not left:
        return so_far
    slowest = min(left, key=lambda one: one.since)
    return f"{so_far}, waits {now - slowest.since:.0f} s for {slowest.waits_for}"


def slowest(groups: Iterable[tuple[str, Collection[Sibling]]]) -> list[str]:
    """A line for each of the groups that have been silent longest."""
    now = time.monotonic()
    ranked = sorted(groups, key=lambda group: -silence(group[1], now))
    return [describe(uid, siblings, now) for uid, siblings in ranked[:NAMED]]
