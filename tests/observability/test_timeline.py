"""A timeline holds what its writers were given, in frames that the index describes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from asyncrl.observability import timeline
from asyncrl.observability.timeline import Record
from asyncrl.records.index import usable
from tests.observability.timelines import RECORDS


def test_records_share_frames_and_the_index_says_what_each_holds(tmp_path: Path) -> None:
    writer = timeline.writer(tmp_path, timeline.ROLLOUT)
    for record in RECORDS:
        writer.write(record)
    writer.close()
    (line,) = usable(timeline.folder_of(tmp_path, timeline.ROLLOUT))
    assert (line.groups, line.steps, line.versions) == (["g0", "g1"], [0], [1])


def test_a_share_of_the_groups_is_recorded_and_everything_else(tmp_path: Path) -> None:
    chosen = [f"g{number:08d}a0000" for number in range(4000) if timeline.in_sample(f"g{number:08d}a0000", 0.25)]
    assert 900 < len(chosen) < 1100
    taken: list[Record] = []
    listen = timeline.sampled(taken.append, 0.0)
    for record in RECORDS:
        listen(record)
    assert taken == RECORDS[2:]


def test_a_timeline_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    writer = timeline.TimelineWriter(tmp_path, "rollout", warnings.append)
    monkeypatch.setattr("asyncrl.records.writer.SPARE_BYTES", 1 << 62)  # no disk has so much
    for record in RECORDS:
        writer(record)
        time.sleep(0.15)  # longer than a frame is collected, all in all
    writer.close()
    assert len(warnings) == 1
    assert "MB left" in warnings[0]
    (tmp_path / "timeline" / "launcher").mkdir()
    (tmp_path / "timeline" / "launcher" / "000000.frames").write_bytes(b"not ours, but long enough for a header")
    timeline.TimelineWriter(tmp_path, "launcher", warnings.append)(RECORDS[4])
    assert "is not a recording of asyncrl" in warnings[1]
    assert not (tmp_path / "timeline" / "trainer-0").exists()
    timeline.TimelineWriter(tmp_path, "trainer 0", warnings.append, enabled=False)(RECORDS[4])
    assert not (tmp_path / "timeline" / "trainer-0").exists()
