"""Buckets as safetensors files, whose bytes after the header are those of the bucket, and the folders for them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import Bucket

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
}
ALIGNMENT = 8  # readers map the bytes, which should start at a multiple of the widest item


def publish_folder(shared: str | None, run_dir: Path) -> Path:
    """Return a folder that belongs to this run alone, because several runs may share `weights.folder`. Its name there
    follows from the path of the run folder, so that a resumed run finds it again."""
    if not shared:
        return run_dir / "weights"
    digest = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:12]
    return Path(shared).expanduser() / "-".join(filter(None, (run_dir.parent.name, run_dir.name, digest)))


def claim(folder: Path) -> None:
    """Create a private folder, or check that it belongs to this user. Raises WeightsError if it does not: its owner
    could exchange the files before the engines load them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, owner = folder.lstat(), None
    if stat.S_ISDIR(found.st_mode):
        with suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as own:
            owner = os.fstat(own.fileno()).st_uid  # not our number where the file system maps users
    if owner != found.st_uid:
        raise WeightsError(f"{folder} belongs to another user, or is a link: remove it, or set another weights.folder")


def write_stream(
    file: Path,
    bucket: Bucket,
    stream: Iterator[tuple[str, Tensor]],
    metadata: dict[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write the stream's next tensors to their places in the bucket, with one in memory at a time. A `durable` file is
    meant to outlive the run. Raises WeightsError with the file if the disk cannot take it, and removes it then.

    Format: 8 bytes with the header's length, the header (JSON, padded with spaces), the tensors.
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for entry in bucket:
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    places = {entry.name: 8 + len(text) + entry.start for entry in bucket}
    whole = False
    try:
        with file.open("wb", buffering=0) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _ in bucket:
                name, tensor = next(stream)
                out.seek(places[name])
                rest = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                while rest:  # one call writes at most 2 GiB
                    rest = rest[out.write(rest) or 0 :]
            if durable:
                os.fsync(out.fileno())
        whole = True
    except OSError as error:
        raise WeightsError(f"{file} cannot be written: {error}. Free some space, or choose another folder.") from None
    finally:
        if not whole:
            file.unlink(missing_ok=True)


def write_index(folder: Path, files: dict[str, Bucket]) -> None:
    """Write model.safetensors.index.json, which maps each tensor to its file."""
    index = {
        "metadata": {"total_size": sum(entry.end - entry.start for bucket in files.values() for entry in bucket)},
        "weight_map": {entry.name: file for file, bucket in sorted(files.items()) for entry in bucket},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
