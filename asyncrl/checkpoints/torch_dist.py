"""Metadata files of Megatron's `torch_dist` format, which accompany the chunks that torch.distributed.checkpoint
writes.

`.metadata` holds for every key its global shape and the file and byte offset of each of its chunks; `metadata.json`
names the format, and `common.pt` holds what is not sharded. `.metadata` is a pickle: it is read here by an unpickler
that builds the classes of the format and nothing else. Based on megatron-core 0.16.1, core/dist_checkpointing/.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

from asyncrl.errors import RecordError

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
METADATA = ".metadata"


def _member(enumeration: type, name: str) -> Any:
    """Replace the getattr by which Python 3.11.0 to 3.11.3 pickles the member of an enumeration."""
    if enumeration in (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType):
        return enumeration[name]  # type: ignore[index]
    raise pickle.UnpicklingError("it calls getattr for something other than a memory format or an item type")


_OLD = "megatron.core.dist_checkpointing.strategies.torch"
"""Module of the classes that megatron-core wrote before 0.16; they have some fields more than torch's."""
_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    planner.SavePlan,  # Megatron also stores how its ranks divided the writing
    planner.WriteItem,
    planner.WriteItemType,
    planner.TensorWriteData,
    planner.BytesIOWriteData,
    filesystem._StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
)
_ALLOWED = {
    **{(one.__module__, one.__name__): one for one in _CLASSES},
    (_OLD, "MCoreMetadata"): metadata.Metadata,
    (_OLD, "MCoreSavePlan"): planner.SavePlan,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("builtins", "getattr"): _member,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which this format does not allow")


def read_metadata(folder: Path) -> Metadata:
    """Read a folder's `.metadata`. Raises RecordError for anything that the format does not allow."""
    path = folder / METADATA
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except RecordError as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def parse(data: bytes) -> Metadata:
    """Parse the bytes of a `.metadata`. Raises RecordError for anything that the format does not allow."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001  damaged bytes may raise anything
        raise RecordError(f"{type(error).__name__}: {error}") from None
    if not isinstance(found, Metadata):
        raise RecordError(f"it holds a {type(found).__name__} instead of the metadata of a checkpoint")
    return found


def write_frame(folder: Path, version: int) -> None:
    """Write the files that accompany the chunks: metadata.json and common.pt."""
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
    buffer = io.BytesIO()  # torch.save to a full disk raises an error of its own
    torch.save({"checkpoint_version": 3.0, "iteration": version}, buffer)
    (folder / "common.pt").write_bytes(buffer.getvalue())
