"""Events of a recording, and a writer of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.extensions.recording.events import Committed, Event, Rejected, packed
from asyncrl.extensions.recording.writer import Writer
from asyncrl.rollout.events import Admitted, Taken
from asyncrl.schema import Group
from tests.fakes import group


def told(steps: int = 3, batch: int = 2, pack: Callable[[Group], Any] = packed) -> list[Event]:
    """Groups that are played and taken, one of them rejected."""
    found: list[Event] = [Rejected(0, "no_signal", 4, pack(group(1000)))]
    for step in range(steps):
        slots = range(step * batch, (step + 1) * batch)
        found += [Admitted(slot, step, step, f"p{slot}", 2) for slot in slots]
        found += [Committed(slot, pack(group(slot, prompt=[12, slot, 11])), 0) for slot in reversed(slots)]
        found.append(Taken(step, [f"g{slot}" for slot in slots], {"tokens/generated": float(step)}))
    return found


def write(folder: Path, events: list[Event], *, apart: bool = True) -> None:
    """Each event in a frame of its own, or as they come."""
    writer = Writer(folder)
    for event in events:
        writer.write(event)
        if apart:
            writer.flush()
    writer.close()
    assert writer.failed is None
