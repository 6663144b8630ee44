"""Which events of a recording belong to the run, where it went on from checkpoints: the others were rolled back.

began 0 . . . saved 4 . . . . . saved 8 . . . |killed| began 4 . . . saved 8 . . .
[---------------------]                        [--------------------------------]   kept
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.records.events import Began, Event, Saved


def kept(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Stretches [start, end) of the numbers of events. A run that goes on from version v goes on behind the last
    `saved` of v before it; one that began anew, from nothing."""
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
