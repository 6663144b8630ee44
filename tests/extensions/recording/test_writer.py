"""A recording holds what was written, whatever its end looks like, and a disk that fails costs the recording alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.events import Event, compressed, decode, packed
from asyncrl.extensions.recording.writer import Writer
from tests.examples import examples
from tests.extensions.recording.told import told, write


def held(folder: Path) -> list[Event]:
    return [event for frame in frames.Frames(folder) for event in decode(frame.data)]


@given(st.data())
@settings(max_examples=examples(100))
def test_torn_tail_is_left_out_and_counted_and_writing_goes_on(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Cut off at any byte: what was whole is read, and a writer goes on behind it."""
    folder = tmp_path_factory.mktemp("torn")
    write(folder, told(2, pack=data.draw(st.sampled_from([packed, compressed]))))
    path = frames.path_of(folder, 0)
    whole = path.read_bytes()
    ends = [frame.end for frame in frames.Frames(folder)]
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = sum(end <= cut for end in ends)
    assert held(folder) == told(2)[:kept]
    writer = Writer(folder)
    assert writer.left_out == cut - (ends[kept - 1] if kept else len(frames.MAGIC) if cut >= len(frames.MAGIC) else 0)
    writer.write(told()[0])
    writer.close()
    assert held(folder) == [*told(2)[:kept], told()[0]]


def test_damage_before_the_end_is_refused_and_no_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, told())
    path = frames.path_of(tmp_path, 0)
    data = bytearray(path.read_bytes())
    third = list(frames.Frames(tmp_path))[2]
    data[third.end - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"frame at byte {third.place.offset} is damaged"):
        held(tmp_path)


def test_hanging_disk_ends_the_recording_and_blocks_nobody(tmp_path: Path, monkeypatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr("asyncrl.extensions.recording.writer.PATIENCE", 0.05)
    monkeypatch.setattr("asyncrl.extensions.recording.writer.MOST_WAITING", 0)
    monkeypatch.setattr(Writer, "_append", lambda *_: stuck.wait(30))
    writer = Writer(tmp_path)
    for event in told()[:3]:
        writer.write(event)
    writer.close()
    assert "within" in str(writer.failed)
    stuck.set()


def test_full_disk_ends_the_recording_and_leaves_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    writer = Writer(tmp_path, warn=warnings.append)
    writer.write(told()[0])
    writer.flush()
    monkeypatch.setattr("asyncrl.extensions.recording.writer.SPARE_BYTES", 1 << 62)
    writer.write(told()[1])
    writer.flush()
    assert "MB left" in str(writer.failed)
    writer.write(told()[2])
    writer.close()
    assert held(tmp_path) == told()[:1]
    assert warnings == [f"{writer.failed}. The run continues without it."]
