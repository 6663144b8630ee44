"""A comparison finds where a run differs from a recorded one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.records.events import Committed, packed
from asyncrl.records.reading import Recording
from asyncrl.records.writer import Writer
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.compare import Comparison, difference
from asyncrl.rollout.recorder import Recorder
from asyncrl.schema import Completion, Group, VersionSpan
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
    writer = Writer(tmp_path)
    for slot in range(2):
        writer.write(Committed(slot, 0, packed(group(slot, rewards=[0.0, 1.0])), 0))
    writer.close()
    told: list[dict[str, object]] = []
    heard: list[Group] = []

    class Then(Recorder):
        def committed(self, ticket: Ticket, group: Group, discarded: int) -> None:
            heard.append(group)

    comparison = Comparison(Recording(tmp_path), told.append, Then())
    changed = group(1, rewards=[0.0, 1.0])
    turn = changed.trajectories[1].turns[0]
    changed.trajectories[1].turns[0] = msgspec.structs.replace(turn, completion=answer([0, 7]))
    for one in (group(0, rewards=[0.0, 1.0]), changed, group(0, prompt=[12, 9, 11]), group(5)):
        comparison.committed(Ticket(one.slot, 0, 0), one, 0)
    assert [line["same"] for line in told] == [True, True, True, False]
    assert (told[3]["uid"], told[3]["trajectory"], told[3]["turn"], told[3]["token"]) == ("g1", 1, 0, 1)
    assert comparison.take_figures() == {"compare/same": 0.75, "compare/gap": 0.0, "compare/others": 2.0}
    assert len(heard) == 4


def test_every_event_is_forwarded() -> None:
    """An event that is missing in the recording would make a replay of its schedule fail."""
    assert {name for name in vars(Recorder) if not name.startswith("_")} <= vars(Comparison).keys()
