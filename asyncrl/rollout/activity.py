"""Diagnosis of running groups: what each one is waiting for, and since when.

A session records what its episode waits for (engine/client.py): its agent, its reward, an engine's output, the end of a
weight update. Which engine serves a group is the router's choice and is not reported here: the group's uid is its
routing key.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Protocol

from asyncrl.engine.inflight import FIRST, HELD, NEXT

AGENT, REWARD, TEACHER, NOTHING = "its agent", "its reward", "its teacher", ""
"""What a session waits for between its requests; NOTHING once its episode has ended."""
PHASES = {
    **dict(zip((HELD, FIRST, NEXT), ("queued", "prefill", "decode"), strict=True)),
    **dict(zip((AGENT, REWARD, TEACHER, NOTHING), ("agent", "reward", "teacher", "waiting"), strict=True)),
}
"""Phases of an episode by what its session waits for; anything else is another attempt."""
NAMED = 4
"""Number of groups that a diagnosis lists."""


class SiblingActivity(Protocol):
    """One running episode of a group."""

    received: int
    waits_for: str
    since: float


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


def phase(sibling: SiblingActivity) -> str:
    """Return the phase of an episode."""
    return PHASES.get(sibling.waits_for, "retry")
