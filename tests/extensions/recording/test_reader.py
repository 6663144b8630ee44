"""A recording is read as it was written, whatever its end looks like, and nothing else is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.events import Committed, Event, Rejected, compressed, packed
from asyncrl.extensions.recording.index import index_path
from asyncrl.extensions.recording.reader import Recording, images_of
from asyncrl.extensions.recording.writer import Writer
from asyncrl.images import image_name
from asyncrl.rollout.events import Began, Saved, Taken
from asyncrl.schema import Group, Trajectory, Turn, encode
from tests.examples import examples
from tests.extensions.recording.told import told, write
from tests.fakes import completion, group


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("pack", [packed, compressed])
def test_events_batches_and_groups_come_back_in_their_order(
    tmp_path: Path, apart: bool, indexed: bool, pack: Callable[[Group], Any]
) -> None:
    """Also if other processes have compressed the groups."""
    write(tmp_path / "records", told(pack=pack), apart=apart)
    if not indexed:
        index_path(tmp_path / "records").unlink()
    recording = Recording(tmp_path)
    assert list(recording.events()) == told()
    assert recording.steps == [0, 1, 2]
    assert recording.uids == ["g1000", "g1", "g0", "g3", "g2", "g5", "g4"]
    batch = recording.batch(1)
    assert (batch.version, batch.rollout) == (1, {"tokens/generated": 1.0})
    assert [one.slot for one in batch.groups] == [2, 3]
    assert encode(batch.groups[0]) == encode(group(2, prompt=[12, 2, 11]))
    assert recording.torn == 0


def test_long_recording_is_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 600)
    write(tmp_path, told(8))
    assert len(frames.files(tmp_path)) > 3
    assert list(Recording(tmp_path).events()) == told(8)
    assert [one.slot for one in Recording(tmp_path).batch(7).groups] == [14, 15]


def test_a_torn_tail_is_left_out_and_its_length_is_known(tmp_path: Path) -> None:
    write(tmp_path, told(1))
    path = frames.path_of(tmp_path, 0)
    *_, before, last = frames.Frames(tmp_path)
    path.write_bytes(path.read_bytes()[: last.end - 1])
    recording = Recording(tmp_path)
    assert list(recording.events()) == told(1)[:-1]
    assert recording.torn == last.end - 1 - before.end


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_damaged_files_are_refused_or_read_as_written(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Whatever bytes are changed, added or removed, in frames or index: what is read was written, or RecordError."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    if not folder.exists():
        write(folder / "whole", told(2))
    for name in ("000000.frames", "index.jsonl"):
        content = bytearray((folder / "whole" / name).read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(content)))
            content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
        (folder / name).write_bytes(content)
    try:
        recording = Recording(folder)
        found = list(recording.events())
        batches = [recording.batch(step) for step in recording.steps]
    except RecordError:
        return
    assert found == told(2)[: len(found)]
    for batch in batches:
        assert [one.slot for one in batch.groups] == [2 * batch.version, 2 * batch.version + 1]


def test_index_that_is_wrong_or_behind_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, told())
    lines = index_path(tmp_path).read_text().splitlines()
    random.Random(0).shuffle(lines)
    for content in ("", "\n".join(lines), "{", "\n".join(json.dumps({**json.loads(one), "end": 1}) for one in lines)):
        index_path(tmp_path).write_text(content)
        assert [one.slot for one in Recording(tmp_path).batch(2).groups] == [4, 5]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="record=true"):
        Recording(tmp_path)
    write(tmp_path / "records", told())
    with pytest.raises(RecordError, match="no batch 3, but 0 to 2"):
        Recording(tmp_path).batch(3)
    with pytest.raises(RecordError, match="no group g9"):
        Recording(tmp_path).group("g9")


def test_events_that_were_rolled_back_are_left_out(tmp_path: Path) -> None:
    """Killed behind a checkpoint, gone on from an older one, begun anew."""

    def began(version: int) -> Began:
        return Began("r", 0.0, version, {})

    def record(*events: Event) -> list[Event]:
        writer = Writer(tmp_path)
        for event in events:
            writer.write(event)
        writer.close()
        return list(Recording(tmp_path).events())

    def rejected(slot: int) -> Event:
        return Rejected(slot, "judge", 1, packed(group(slot)))

    first = [began(0), rejected(0), Saved(4), rejected(1), Taken(4, ["g1"], {}), Saved(8), rejected(2)]
    assert record(*first) == first
    assert record(began(4), rejected(3), Saved(8)) == [*first[:3], began(4), rejected(3), Saved(8)]
    recording = Recording(tmp_path)
    assert (recording.uids, recording.steps, recording.began) == (["g0", "g3"], [], 2)
    with pytest.raises(RecordError, match="no group g1"):
        recording.group("g1")
    # from the checkpoint of the second stretch, not of the first
    expected = [*first[:3], began(4), rejected(3), Saved(8), began(8), rejected(4)]
    assert record(rejected(9), began(8), rejected(4)) == expected
    assert len(list(Recording(tmp_path).all_events())) == len(first) + 3 + 3
    assert record(began(0), rejected(5)) == [began(0), rejected(5)]


def test_restarted_process_continues_after_its_snapshot(tmp_path: Path) -> None:
    """Not after that of a checkpoint of the same version, and from version 0, too."""
    before = [Began("r", 0.0, 0, {}), Saved(0, 1), Taken(0, ["g0"], {}), Saved(0, 2), Saved(0), Taken(1, ["g1"], {})]
    writer, again = Writer(tmp_path), [Began("r", 0.0, 0, {}, 2), Taken(1, ["g2"], {})]
    for event in [*before, *again]:
        writer.write(event)
    writer.close()
    assert list(Recording(tmp_path).events()) == [*before[:4], *again]


def test_images_are_stored_once_and_come_back_with_their_groups(tmp_path: Path) -> None:
    png = {image_name(data): data for data in (b"one", b"two")}
    first, second = png
    turn = Turn([], completion(), images=[second])
    groups = [
        Group(f"g{slot}", slot, [1], [Trajectory([turn], 0.0)], "squares", None, [first], png) for slot in range(3)
    ]
    writer = Writer(tmp_path)
    for one, pack in zip(groups, [packed, compressed, compressed], strict=True):
        writer.write(Committed(one.slot, pack(one), 0), one.images)  # type: ignore[arg-type]
    writer.write(Taken(0, ["g0", "g2"], {}))
    writer.close()
    files = sorted((tmp_path / "images").iterdir())
    assert [file.name for file in files] == sorted(f"{name}.png" for name in png)
    assert Recording(tmp_path).batch(0).groups == [groups[0], groups[2]]
    files[0].write_bytes(b"changed")
    with pytest.raises(RecordError, match="is damaged: its content has another SHA-256"):
        Recording(tmp_path).group("g1")
    files[0].unlink()
    with pytest.raises(RecordError, match=f"{files[0].name} of the recording cannot be read"):
        Recording(tmp_path).group("g1")


def test_names_of_images_cannot_leave_the_recording(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "records" / "images").mkdir(parents=True)
    with pytest.raises(RecordError, match="is not the SHA-256 of a file"):
        images_of(tmp_path / "records", ["../../secret"])
