"""A checkpoint is whole, or it is refused: nothing that is damaged is read, and nothing in it is ever run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks

from asyncrl.checkpoints import manifest, torch_dist
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.errors import RecordError
from tests.examples import examples


def write(store: CheckpointStore, version: int, content: bytes = b"some bytes") -> Path:
    folder = store.make_room(version)
    (folder / "policy").mkdir()
    (folder / "policy/chunk").write_bytes(content)
    (folder / "trainer.json").write_bytes(b"{}")
    files = manifest.describe(folder, ["policy/chunk", "trainer.json"])
    manifest.commit(folder, Manifest(manifest.FORMAT, version, "run", 0.0, {}, files))
    return folder


def newest(store: CheckpointStore) -> tuple[int | None, list[str]]:
    told: list[str] = []
    found = store.newest(told.append)
    return found[1].version if found else None, told


def test_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert newest(store) == (None, [])
    for version in (3, 20, 100):
        write(store, version)
    store.make_room(200)  # cut short: no manifest
    assert newest(store) == (100, [])
    assert store.versions() == [3, 20, 100]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed byte": (lambda folder: (folder / "policy/chunk").write_bytes(b"some bytez"), "checksum differs"),
    "a cut file": (lambda folder: os.truncate(folder / "policy/chunk", 4), "it has 4 bytes instead of 10"),
    "a file less": (lambda folder: (folder / "policy/chunk").unlink(), "cannot be read: No such file"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 40), "manifest.json is damaged"),
    "an empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json is damaged"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoint_is_refused_and_the_last_one_used(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 3)
    damage(write(store, 4))
    version, told = newest(store)
    assert version == 3
    (text,) = told
    assert text.startswith("checkpoint 4 is skipped: ")
    assert reason in text


def test_manifest_of_other_format_or_outside_files_is_refused(tmp_path: Path) -> None:
    folder = write(CheckpointStore(tmp_path), 1)
    whole = manifest.read(folder)
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../../../secret", str(tmp_path / "secret")):
        files = manifest.describe(tmp_path, ["secret"])
        manifest.commit(folder, msgspec.structs.replace(whole, files={name: files["secret"]}))
        with pytest.raises(RecordError, match="it lists"):
            manifest.verified(folder)
    manifest.commit(folder, msgspec.structs.replace(whole, format=99))
    with pytest.raises(RecordError, match="has format 99, but this version of asyncrl reads 1"):
        manifest.verified(folder)


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_manifest_with_any_damage_is_refused_or_says_the_same(data: st.DataObject, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.path(1) if store.versions() else write(store, 1)
    whole = (folder / "manifest.json").read_bytes()
    before = manifest.read(folder)
    place = data.draw(st.integers(0, len(whole) - 1))
    (folder / "manifest.json").write_bytes(whole[:place] + data.draw(st.binary(max_size=4)) + whole[place + 1 :])
    try:
        files = manifest.verified(folder).files
    except RecordError:
        files = before.files
    finally:
        (folder / "manifest.json").write_bytes(whole)
    assert files == before.files


def test_newest_and_those_for_ever_stay_and_the_rest_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for version in range(2, 22, 2):
        write(store, version)
        store.prune(keep_last=2, keep_every=8)
    assert store.versions() == [8, 16, 18, 20]
    store.make_room(22)  # cut short
    store.prune(keep_last=1, keep_every=None)
    assert [path.name for path in store.folder.iterdir()] == ["00000020"]


def test_room_on_the_disk_is_asked_for_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.lacks(1000) is None
    problem = store.lacks(1 << 60)
    assert problem is not None
    assert "GB left" in problem


# --- Megatron's .metadata is a pickle -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as torch writes it."""
    made = tmp_path_factory.mktemp("dist")
    with contextlib.redirect_stderr(io.StringIO()), pytest.warns(UserWarning, match="single process"):
        save_chunks({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, checkpoint_id=made)
    return made


def test_metadata_is_what_torch_wrote(folder: Path) -> None:
    found = torch_dist.read_metadata(folder)
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    assert (found.state_dict_metadata, found.storage_data) == (theirs.state_dict_metadata, theirs.storage_data)


class Old(metadata.Metadata):
    """megatron-core 0.15 writes a subclass with a field of its own."""


def test_metadata_of_an_older_megatron_is_read_without_megatron(folder: Path) -> None:
    plain = torch_dist.read_metadata(folder)
    old = Old(plain.state_dict_metadata, storage_data=plain.storage_data)
    vars(old)["mcore_data"] = {"decoder": {"nd_reformulated_orig_global_shape": (2, 3)}}
    data, name = pickle.dumps(old, protocol=3), f"c{__name__}\nOld\n".encode()
    assert name in data
    found = torch_dist.parse(data.replace(name, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))
    assert (found.state_dict_metadata, found.storage_data) == (plain.state_dict_metadata, plain.storage_data)


class Run:
    """Pickle that would run code in its reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_pickle_of_anything_else_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Run(tmp_path / "mark")))
    with pytest.raises(RecordError, match=r"it names posix\.mkdir, which this format does not allow"):
        torch_dist.read_metadata(tmp_path)
    assert not (tmp_path / "mark").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(RecordError, match="it holds a list"):
        torch_dist.read_metadata(tmp_path)


class Attribute:
    """Pickled as `getattr(of, name)`, which is what Python 3.11.0 to 3.11.3 makes of an enumeration's members."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.of, self.name)


def test_memory_format_of_every_python_is_read_and_no_other() -> None:
    formats = metadata._MEM_FORMAT_ENCODING
    for written in (formats.TORCH_CHANNELS_LAST, Attribute(formats, "TORCH_CHANNELS_LAST")):
        found = torch_dist.parse(pickle.dumps(metadata.Metadata({}, planner_data=written)))
        assert found.planner_data is formats.TORCH_CHANNELS_LAST
    for refused in (Attribute(formats, "__class__"), Attribute(torch.Size, "__init__")):
        with pytest.raises(RecordError, match=r"KeyError|getattr for something other than a memory format"):
            torch_dist.parse(pickle.dumps(metadata.Metadata({}, planner_data=refused)))


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_metadata_with_any_damage_is_refused_or_read(data: st.DataObject, folder: Path) -> None:
    changed = bytearray((folder / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place : place + 1] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(RecordError):
        torch_dist.parse(bytes(changed))
