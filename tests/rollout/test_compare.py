"""A comparison finds where a run differs from a recorded one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.records.events import Committed, Saved, packed
from asyncrl.records.reading import Recording
from asyncrl.records.writer import Writer
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.compare import ComparingRecorder, difference
from asyncrl.schema import Completion, VersionSpan
from tests.fakes import group


def answer(ids: list[int], shift: float = 0.0) -> Completion:
    return Completion(ids, [-0.5 - shift * i for i in range(len(ids))], [VersionSpan(0, 0, len(ids))], "stop")


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        (answer([1, 2, 3]), answer([1, 2, 3]), (None, 0.0)),
        (answer([1, 2, 3]), answer([1, 2, 3], shift=0.25), (None, 0.5)),
        (answer([1, 2, 9]), answer([1, 2, 3], shift=0.25), (2, 0.25)),
        (answer([1, 2]), answer([1, 2, 3]), (2, 0.0)),
        (answer([]), answer([1]), (0, 0.0)),
    ],
)
def test_first_other_token_and_the_gap_before_it(now: Completion, then: Completion, expected: object) -> None:
    assert difference(now, then) == expected


def test_groups_are_told_apart_and_counted(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "then")
    for slot in range(2):
        writer.write(Committed(slot, packed(group(slot, rewards=[0.0, 1.0])), 0))
    writer.close()
    told: list[dict[str, object]] = []
    comparison = ComparingRecorder(Recording(tmp_path / "then"), told.append)
    changed = group(1, rewards=[0.0, 1.0])
    turn = changed.trajectories[1].turns[0]
    changed.trajectories[1].turns[0] = msgspec.structs.replace(turn, completion=answer([0, 7]))
    for one in (group(0, rewards=[0.0, 1.0]), changed, group(0, prompt=[12, 9, 11]), group(5)):
        comparison.committed(Ticket(one.slot, 0), one, 0)
    assert [line["same"] for line in told] == [True, True, True, False]
    assert (told[3]["uid"], told[3]["trajectory"], told[3]["turn"], told[3]["token"]) == ("g1", 1, 0, 1)
    assert comparison.take_figures() == {"compare/same": 0.75, "compare/gap": 0.0, "compare/others": 2.0}


def test_run_that_is_compared_is_recorded_too(tmp_path: Path) -> None:
    """An event that is missing in the recording would make a replay of its schedule fail."""
    before, writer = Writer(tmp_path / "then"), Writer(tmp_path / "now")
    before.write(Saved(0))
    before.close()
    comparison = ComparingRecorder(Recording(tmp_path / "then"), list[object]().append, writer)
    comparison.committed(Ticket(0, 0), group(0), 0)
    comparison.rejected(Ticket(1, 0), "no_signal", 2, group(1))
    comparison.saved(3)
    writer.close()
    assert [type(event).__name__ for event in Recording(tmp_path / "now").events()] == [
        "Committed",
        "Rejected",
        "Saved",
    ]
    assert comparison.take_figures()["recording/bytes"] > 0
