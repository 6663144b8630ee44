"""A safetensors file written tensor by tensor: the library's own writer wants all of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.weights.bucket import Bucket

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write(file: Path, bucket: Bucket, stream: Iterator[tuple[str, Tensor]]) -> None:
    """Write the stream's next tensors, which `bucket` lays out without gaps, the wider dtypes first.

    Format: 8 bytes with the header's length, the header (JSON, padded with spaces to a multiple of 8), the tensors.
    https://github.com/huggingface/safetensors#format
    """
    header = {
        entry.name: {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
        for entry in bucket
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    start = {entry.name: 8 + len(text) + entry.start for entry in bucket}
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for _ in bucket:
            name, tensor = next(stream)
            opened.seek(start[name])
            opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())
