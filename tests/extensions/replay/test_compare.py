"""A comparison finds where a run differs from a recorded one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.extensions.recording.events import Committed, packed
from asyncrl.extensions.recording.writer import Writer
from asyncrl.extensions.replay.compare import GroupComparison, difference
from asyncrl.jsonl import Tail
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.schema import Completion, VersionSpan
from tests.fakes import addresses, group, tiny_config


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


def begun(folder: Path) -> GroupComparison:
    """Compare with the recording in a folder `then`."""
    comparison = GroupComparison(str(folder / "then"))
    comparison.start(RolloutRun(tiny_config(), addresses(), folder, print))
    return comparison


def test_groups_are_told_apart_and_counted(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "then")
    for slot in range(2):
        writer.write(Committed(slot, packed(group(slot, rewards=[0.0, 1.0])), 0))
    writer.close()
    comparison = begun(tmp_path)
    changed = group(1, rewards=[0.0, 1.0])
    turn = changed.trajectories[1].turns[0]
    changed.trajectories[1].turns[0] = msgspec.structs.replace(turn, completion=answer([0, 7]))
    for one in (group(0, rewards=[0.0, 1.0]), changed, group(0, prompt=[12, 9, 11]), group(5)):
        comparison.group(one)
    told = Tail(tmp_path / "compare.jsonl")()
    assert [line["same"] for line in told] == [True, True, True, False]
    assert (told[3]["uid"], told[3]["trajectory"], told[3]["turn"], told[3]["token"]) == ("g1", 1, 0, 1)
    assert comparison.figures() == {"compare/same": 0.75, "compare/gap": 0.0, "compare/others": 2.0}


def test_run_without_the_setting_is_not_compared(tmp_path: Path) -> None:
    idle = GroupComparison(None)
    idle.start(RolloutRun(tiny_config(), addresses(), tmp_path, print))
    idle.group(group(0))
    assert idle.figures() == {}
    assert not (tmp_path / "compare.jsonl").exists()
