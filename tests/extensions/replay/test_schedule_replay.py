"""A replayed schedule makes the changes of an elastic run (the rest is in tests/integration/test_replay.py)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import RecordError
from asyncrl.extensions.replay.schedule_replay import ScheduleReplay
from asyncrl.rollout.buffer import CohortBuffer
from asyncrl.rollout.events import Adjusted, Admitted

FIRST, SECOND = Admitted(0, 0, 0, "p0", 1), Admitted(1, 0, 1, "p1", 1)


def replayed(*events: Any) -> CohortBuffer:
    """Replay the events with the settings of a run that began with lead 0."""
    buffer = CohortBuffer(1, 1, 0)

    async def main() -> None:
        recording: Any = SimpleNamespace(events=lambda: iter(events), folder="run")
        await ScheduleReplay(recording, buffer).play()

    asyncio.run(main())
    return buffer


def test_groups_that_a_higher_lead_admitted_are_admitted_again() -> None:
    buffer = replayed(FIRST, Adjusted(1, 0.0), SECOND)
    assert (buffer.lead, buffer.books.places()["groups"].running) == (1, 2)
    with pytest.raises(RecordError, match="the buffer admits None"):
        replayed(FIRST, SECOND)
