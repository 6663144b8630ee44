"""A timeline holds what its writers were given, in frames that the index describes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from asyncrl.extensions.recording.index import usable
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.reader import TimelineReader
from asyncrl.observability.timeline import LAUNCHER, Phases, ProcessSpan
from tests.extensions.timelines.made import RECORDS
from tests.fakes import tiny_config


def test_records_share_frames_and_the_index_says_what_each_holds(tmp_path: Path) -> None:
    writer = files.writer(tmp_path, files.ROLLOUT)
    for record in RECORDS:
        writer.write(record)
    writer.close()
    (line,) = usable(files.folder_of(tmp_path, files.ROLLOUT))
    assert (line.groups, line.steps, line.versions) == (["g0", "g1"], [0], [1])


def test_a_share_of_the_groups_is_recorded_and_everything_else(tmp_path: Path) -> None:
    chosen = [f"g{number:08d}a0000" for number in range(4000) if files.in_sample(f"g{number:08d}a0000", 0.25)]
    assert 900 < len(chosen) < 1100
    writer = files.TimelineWriter(tmp_path, files.ROLLOUT, print, 0.0)
    for record in RECORDS:
        writer.record(record)
    writer.close()
    assert list(TimelineReader(tmp_path).new()) == RECORDS[2:]


def test_a_timeline_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    writer = files.TimelineWriter(tmp_path, "rollout", warnings.append)
    monkeypatch.setattr("asyncrl.extensions.recording.writer.SPARE_BYTES", 1 << 62)  # no disk has so much
    for record in RECORDS:
        writer.record(record)
        time.sleep(0.15)  # longer than a frame is collected, all in all
    writer.close()
    assert len(warnings) == 1
    assert "MB left" in warnings[0]
    (tmp_path / "timeline" / "launcher").mkdir()
    (tmp_path / "timeline" / "launcher" / "000000.frames").write_bytes(b"not ours, but long enough for a header")
    files.TimelineWriter(tmp_path, "launcher", warnings.append).record(RECORDS[4])
    assert "is not a recording of asyncrl" in warnings[1]


def test_phases_of_a_process_are_in_its_folder_unless_turned_off(tmp_path: Path) -> None:
    for recorded in (False, True):
        assert not (tmp_path / "timeline").exists()
        phases = Phases(tiny_config(**{"timelines.record": recorded}), tmp_path, LAUNCHER, print)
        phases("restart", -1, 1.0, 2.0, process="router", how="killed")
        phases("publish", 3, 2.0, 4.0, "publish")
        phases.close()
    assert list(TimelineReader(tmp_path).new()) == [
        ProcessSpan("launcher", "restart", 1.0, 2.0, -1, {"process": "router", "how": "killed"}),
        ProcessSpan("launcher publish", "publish", 2.0, 4.0, 3),
    ]
