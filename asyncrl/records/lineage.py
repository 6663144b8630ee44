"""Lineage of a recording with resumes: which events belong to the run, and which were rolled back by a resume.

began 0 . . . saved 4 . . . . . saved 8 . . . |killed| began 4 . . . saved 8 . . .
[---------------------]                        [--------------------------------]   kept
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.records.events import Began, Event, Saved


def kept(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of event numbers that belong to the run. A run resumed at version v continues
    after the last preceding `saved` of v; a run that started from scratch continues nothing."""
    stretches: list[tuple[int, int]] = []
    saved: dict[int, int] = {}
    count = 0
    for number, event in enumerate(events):
        count = number + 1
        if isinstance(event, Saved):
            saved[event.version] = count
        elif isinstance(event, Began):
            if stretches:
                stretches[-1] = stretches[-1][0], number
            end = saved.get(event.version, 0) if event.version else 0
            stretches = [(first, min(last, end)) for first, last in stretches if first < end]
            stretches.append((number, number))
        elif not stretches:
            stretches.append((number, number))
    if stretches:
        stretches[-1] = stretches[-1][0], count
    return stretches
