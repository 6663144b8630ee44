"""A timeline is read as it was written: while it is being written, after a kill, and each record once."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.frames import path_of
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.reader import TimelineReader, processes
from tests.extensions.timelines.made import RECORDS, recorded


def test_a_reader_that_follows_gets_every_record_once(tmp_path: Path) -> None:
    reader = TimelineReader(tmp_path)
    assert list(reader.new()) == []
    rollout, trainer = files.writer(tmp_path, files.ROLLOUT), files.writer(tmp_path, "trainer 0")
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
    assert processes(tmp_path) == ["rollout", "trainer-0"]
    rollout.close()
    trainer.close()
    assert list(TimelineReader(tmp_path).new()) == RECORDS[:5]


def test_torn_frame_waits_and_a_restart_drops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 300)  # the reader crosses files
    writer = files.writer(tmp_path, files.ROLLOUT)
    for slot in range(8):
        writer.write(recorded(slot))
        writer.flush()
    writer.close()
    folder = files.folder_of(tmp_path, files.ROLLOUT)
    assert len(frames.files(folder)) > 1
    last = path_of(folder, frames.files(folder)[-1])
    whole = last.read_bytes()
    last.write_bytes(whole[:-5])
    reader = TimelineReader(tmp_path)
    assert list(reader.new()) == [recorded(slot) for slot in range(7)]
    last.write_bytes(whole)
    assert list(reader.new()) == [recorded(7)]
    last.write_bytes(whole[:-5])
    again = files.writer(tmp_path, files.ROLLOUT)
    again.write(recorded(9))
    again.close()
    assert list(TimelineReader(tmp_path).new()) == [recorded(slot) for slot in (0, 1, 2, 3, 4, 5, 6, 9)]
