"""A timeline is read as it was written: while it is being written, after a kill, and each record once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from asyncrl.observability import timeline
from asyncrl.observability.intervals import DECODE, Interval
from asyncrl.observability.timeline import (
    BatchTimeline,
    EngineSpan,
    EpisodeTimeline,
    GroupTimeline,
    ProcessSpan,
    PublishTimeline,
    Record,
    TimelineReader,
)
from asyncrl.records import frames
from asyncrl.records.frames import path_of
from asyncrl.records.index import usable


def group(slot: int, ended: float = 2.0) -> GroupTimeline:
    episode = EpisodeTimeline(1.0, 7, [Interval(DECODE, 1.0, ended, version=3)])
    return GroupTimeline(f"g{slot}", slot, "copy", "training", 3, 0.5, ended, "committed", [episode])


RECORDS: list[Record] = [
    group(0),
    group(1),
    BatchTimeline(0, 1.5, 2.0, ["g0", "g1"], "g1"),
    PublishTimeline(1, 3.0, 3.5),
    ProcessSpan("trainer 0", "forward", 2.0, 2.5, 0, {"micro_batches": 2.0}),
    EngineSpan("engine 0", "Req", "a" * 32, "b" * 16, "", 1.0, 2.0, {"rid": "x"}),
]


def test_a_reader_that_follows_gets_every_record_once(tmp_path: Path) -> None:
    reader = TimelineReader(tmp_path)
    assert list(reader.new()) == []
    rollout, trainer = timeline.writer(tmp_path, timeline.ROLLOUT), timeline.writer(tmp_path, "trainer 0")
    rollout.write(RECORDS[0])
    rollout.flush()
    assert list(reader.new()) == RECORDS[:1]
    for record in RECORDS[1:4]:
        rollout.write(record)
    trainer.write(RECORDS[4])
    rollout.flush()
    trainer.flush()
    assert list(reader.new()) == RECORDS[1:5]
    assert list(reader.new()) == []
    assert timeline.processes(tmp_path) == ["rollout", "trainer-0"]
    rollout.close()
    trainer.close()
    assert list(TimelineReader(tmp_path).new()) == RECORDS[:5]


def test_a_torn_frame_waits_until_it_is_whole_and_a_restart_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 300)  # the reader crosses files
    writer = timeline.writer(tmp_path, timeline.ROLLOUT)
    for slot in range(8):
        writer.write(group(slot))
        writer.flush()
    writer.close()
    folder = timeline.folder_of(tmp_path, timeline.ROLLOUT)
    assert len(frames.files(folder)) > 1
    last = path_of(folder, frames.files(folder)[-1])
    whole = last.read_bytes()
    last.write_bytes(whole[:-5])
    reader = TimelineReader(tmp_path)
    assert list(reader.new()) == [group(slot) for slot in range(7)]
    last.write_bytes(whole)
    assert list(reader.new()) == [group(7)]
    last.write_bytes(whole[:-5])
    again = timeline.writer(tmp_path, timeline.ROLLOUT)
    again.write(group(9))
    again.close()
    assert list(TimelineReader(tmp_path).new()) == [group(slot) for slot in (0, 1, 2, 3, 4, 5, 6, 9)]


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
