"""Buckets as safetensors files: a bucket's bytes are already what such a file holds after its header."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import Bucket

# https://github.com/huggingface/safetensors#format
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
}
ALIGNMENT = 8  # readers map the bytes: they want to begin on a multiple of the widest item


def write_bucket(file: Path, flat: Tensor, bucket: Bucket, metadata: dict[str, str] | None = None) -> None:
    """Write one bucket (`flat`: uint8, on CPU). Raises WeightsError with the file when the disk does not take it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for entry in bucket:
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    try:
        with file.open("wb", buffering=0) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            rest = flat.numpy().data
            while rest:  # one call writes at most 2 GiB
                rest = rest[out.write(rest) or 0 :]
    except OSError as error:
        file.unlink(missing_ok=True)
        raise WeightsError(f"{file} cannot be written: {error}. Free space, or choose another folder.") from None


def write_index(folder: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    """model.safetensors.index.json: which file holds which tensor."""
    weight_map = {name: file for file, names in sorted(files.items()) for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
