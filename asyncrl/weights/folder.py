"""Reader and writer of the safetensors files of a folder, one tensor at a time. Weights in FP8 (e4m3 with a scale for
each block of 128 x 128, as in DeepSeek-V3's files) and in MXFP4 (gpt-oss's) are read in bfloat16."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.mapping import Mapping

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
IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # buffers in old checkpoints; the model computes them from the config
HASHERS = 8
"""Threads that compute hashes, each with one tensor in memory."""
SCALES, BLOCK = "_scale_inv", 128
MXFP4_CODES, MXFP4_SCALES = "_blocks", "_scales"
"""Endings of the two tensors of a weight in MXFP4: [experts, rows, blocks, 16] pairs of codes, and a scale for each
block of 32."""
MTP_LAYER = re.compile(r"(.*\.layers\.\d+\.)eh_proj\.weight")  # only layers of multi-token prediction have this tensor


def dequantized(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Return in bfloat16 the weight of which a folder holds codes and scales. Raises WeightsError if they do not
    fit."""
    rows, columns = codes.shape
    blocks = [-(-rows // BLOCK), -(-columns // BLOCK)]
    if codes.dtype is not torch.float8_e4m3fn or list(scales.shape) != blocks:
        found = f"{name} is {codes.dtype} {list(codes.shape)} with scales {list(scales.shape)}"
        raise WeightsError(f"{found}, but only e4m3 with one scale for each block of 128 x 128 is read, here {blocks}")
    wide = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * wide).bfloat16()


class HFFolder:
    """One or many .safetensors files, open inside the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        self._read: set[str] = set()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for file in self._files():
            try:
                opened = self._open.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._open.close()
                raise WeightsError(f"{file} cannot be read: {error}. Copy or convert it again.") from None
            self._file_of.update(dict.fromkeys(opened.keys(), opened))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _files(self) -> list[Path]:
        """Return the files of the index if there is one, because some folders hold the same weights again in another
        format."""
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return [self._folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{self._folder} holds no .safetensors file")
        return files

    def names(self) -> list[str]:
        """Return the names of all tensors but scales."""
        packed = {name.removesuffix(MXFP4_CODES) for name in self._file_of if name.endswith(MXFP4_CODES)}
        parts = {base + end for base in packed for end in (MXFP4_CODES, MXFP4_SCALES)}
        return [*sorted(packed), *(name for name in self._file_of if not name.endswith(SCALES) and name not in parts)]

    def described(self, name: str) -> Tensor:
        """Return a tensor without its values, on the meta device."""
        if shape := self._packed_shape(name):
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")
        found = self._file_of[name].get_slice(name)
        dtype = next(dtype for dtype, short in DTYPES.items() if short == found.get_dtype())
        dtype = torch.bfloat16 if name + SCALES in self._file_of else dtype
        return torch.empty(found.get_shape(), dtype=dtype, device="meta")

    def _packed_shape(self, name: str) -> list[int] | None:
        """Return the shape of a weight in MXFP4, or None for one of another kind. The codes are transposed."""
        if name + MXFP4_CODES not in self._file_of:
            return None
        experts, rows, blocks, pairs = self._file_of[name + MXFP4_CODES].get_slice(name + MXFP4_CODES).get_shape()
        return [experts, blocks * pairs * 2, rows]

    def read(self, name: str, shape: Sequence[int] | None = None, expert: int | None = None) -> Tensor:
        """Read one tensor, or what a stack holds of one expert. Raises WeightsError if it is missing or has another
        shape."""
        packed = self._packed_shape(name)
        if name not in self._file_of and not packed:
            raise WeightsError(f"{name} is missing in {self._folder}")
        found = packed or self._file_of[name].get_slice(name).get_shape()
        if shape is not None and found != list(shape):
            raise WeightsError(f"{name} in {self._folder} is {found}, but config.json asks for {list(shape)}")
        self._read.add(name)
        if packed:
            return self._unpacked(name, expert)
        file = self._file_of[name]
        if expert is not None:
            one: Tensor = file.get_slice(name)[expert]
            return one
        tensor: Tensor = file.get_tensor(name)
        scales = self._file_of.get(name + SCALES)
        return tensor if scales is None else dequantized(name, tensor, scales.get_tensor(name + SCALES))

    def _unpacked(self, name: str, expert: int | None) -> Tensor:
        """Read a weight in MXFP4, or that of one expert."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        which = slice(None) if expert is None else slice(expert, expert + 1)
        codes, scales = (
            self._file_of[part].get_slice(part)[which] for part in (name + MXFP4_CODES, name + MXFP4_SCALES)
        )
        found: Tensor = convert_moe_packed_tensors(codes, scales)
        return found if expert is None else found[0]

    def digest(self) -> str:
        """Return a SHA-256 of all tensors with their names, which does not depend on how files divide them."""
        with ThreadPoolExecutor(HASHERS) as pool:
            of_each = pool.map(self._digest, sorted(self._file_of))
            return hashlib.sha256("".join(of_each).encode()).hexdigest()

    def _digest(self, name: str) -> str:
        tensor = self._file_of[name].get_tensor(name)
        found = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def mtp_names(self) -> list[str]:
        """Return the tensors of multi-token prediction layers, which draft further tokens. The trainer does not load
        them; exports contain them unchanged."""
        layers = tuple(found[1] for name in self.names() if (found := MTP_LAYER.fullmatch(name)))
        return [name for name in self.names() if name.startswith(layers)]

    def check_nothing_left(self, mapping: Mapping, mine: Callable[[str], bool] = lambda name: False) -> None:
        """Raise WeightsError with the tensors that would be lost silently: those that no Megatron parameter holds, and
        those that belong to this reader (`mine`) but were not read."""
        given = set(self.names()) - set(self.mtp_names())
        left = sorted(
            name
            for name in given
            if not IGNORED.search(name) and (not mapping.knows(name) or (mine(name) and name not in self._read))
        )
        if left:
            raise WeightsError(
                f"{self._folder} holds tensors that this {mapping.architecture} has no place for: {', '.join(left[:5])}"
                + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            )


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
