"""Reader and writer of Megatron checkpoint folders in `torch_dist` format, one tensor at a time, without Megatron and
without a process group.

The format is torch.distributed.checkpoint's: files of pickled chunks, and `.metadata`, which holds for every key its
whole shape and the file and byte offset of each of its chunks. Megatron adds `metadata.json` (the format) and
`common.pt` (what is not sharded). Based on megatron-core 0.16.1, core/dist_checkpointing/.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from asyncrl.checkpoints.torch_dist import FORMAT, read_metadata, write_frame
from asyncrl.errors import RecordError, WeightsError
from asyncrl.extensions.convert.parameters import Address, Parameter

OPTIMIZER = re.compile(r"^(chained_\d+\.)?optimizer\.")


class CheckpointReader:
    """The model's tensors in a folder that Megatron saved, under any layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        _check_format(folder)
        try:
            metadata = read_metadata(folder)
        except RecordError as error:
            raise WeightsError(f"{error}. Copy the folder again.") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not OPTIMIZER.match(key)
        }
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def locate(self, parameter: Parameter) -> Address:
        """Return where this checkpoint holds the parameter. Raises WeightsError if it is missing, or stacked in other
        numbers."""
        for address in parameter.addresses:
            if address.key in self._tensors:
                leading = tuple(self._tensors[address.key].size[: len(address.counts)])
                if leading != address.counts:
                    raise WeightsError(
                        f"{address.key} in {self._folder} stacks {leading} tensors, but config.json requires "
                        f"{address.counts}"
                    )
                return address
        raise WeightsError(f"{parameter.name} is missing in {self._folder}")

    @property
    def model_keys(self) -> set[str]:
        """Keys of all tensors that are not the optimizer's."""
        return set(self._tensors)

    def described(self, address: Address) -> Tensor:
        """Return the tensor without its values, on the meta device."""
        entry = self._tensors[address.key]
        return torch.empty(entry.size[len(address.counts) :], dtype=entry.properties.dtype, device="meta")

    def read(self, address: Address) -> Tensor:
        """Read one tensor and assemble it from its chunks. Raises WeightsError if chunks are missing or unreadable."""
        entry = self._tensors[address.key]
        ones = (1,) * len(address.index)
        shape = entry.size[len(address.counts) :]
        whole = torch.empty(ones + shape, dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(address.index + (0,) * len(shape)), whole.shape)
        saved = TensorStorageMetadata(entry.properties, entry.size, self._chunks_at(address))
        items = create_read_items_for_chunk_list(address.key, saved, [wanted])
        if sum(math.prod(item.lengths) for item in items) != whole.numel():
            raise WeightsError(f"{address.key} at {address.index} has no or overlapping chunks in {self._folder}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(whole)).wait()
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise WeightsError(f"{address.key} at {address.index} in {self._folder} cannot be read: {reason}") from None
        return whole.view(shape)

    def _chunks_at(self, address: Address) -> list[ChunkStorageMetadata]:
        """Look up the chunks by their leading offsets, because experts of many layers have tens of thousands of chunks
        under one key."""
        if address.key not in self._chunks:
            axes, by_index = len(address.counts), defaultdict(list)
            for chunk in self._tensors[address.key].chunks:
                by_index[tuple(chunk.offsets[:axes])].append(chunk)
            self._chunks[address.key] = by_index
        return self._chunks[address.key].get(address.index, [])


def _check_format(folder: Path) -> None:
    try:
        found = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        raise WeightsError(
            f"{folder} is not a Megatron checkpoint: no readable metadata.json (give the folder of one iteration)"
        ) from None
    if found != FORMAT["sharded_backend"]:
        raise WeightsError(f"{folder} is a {found} checkpoint; only torch_dist can be converted")


class _Into(DefaultLoadPlanner):
    """A load planner that lets a storage reader fill one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.transform_tensor(read_item, self._target)


class CheckpointWriter:
    """Writes tensors in the order of `add` into files of at most `limit` bytes (or one tensor) in `folder`.

    `report(file, bytes)` is called for each finished file. `finish` makes the folder a checkpoint.
    """

    def __init__(self, folder: Path, limit: int, report: Callable[[Path, int], None]) -> None:
        self._folder, self._limit, self._report = folder, limit, report
        self._file: BinaryIO | None = None
        self._count = 0
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._empty: _StorageInfo | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, parameter: Parameter, tensor: Tensor) -> None:
        """Write one parameter. Raises WeightsError if it does not match those that it is stacked with."""
        address = parameter.addresses[0]
        ones = (1,) * len(address.index)
        size = torch.Size(address.counts + tuple(tensor.shape))
        entry = self._entries.setdefault(
            address.key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [])
        )
        assert isinstance(entry, TensorStorageMetadata)
        if (entry.size, entry.properties.dtype) != (size, tensor.dtype):
            one, other = (tuple(entry.size), entry.properties.dtype), (tuple(size), tensor.dtype)
            raise WeightsError(
                f"{parameter.name} has the stacked shape and dtype {other}, but the tensors before it have {one}. "
                "If the dtypes differ, pass --dtype."
            )
        offsets = torch.Size(address.index + (0,) * tensor.ndim)
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(ones + tuple(tensor.shape))))
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes the entire storage
        self._places[MetadataIndex(address.key, offsets)] = self._write(tensor.view(ones + tuple(tensor.shape)))
        if parameter.found.megatron.startswith("decoder.") and parameter.found.layout.split:
            self._add_extra_state(address)

    def _add_extra_state(self, address: Address) -> None:
        """Add the empty object that Megatron's parallel linears expect beside their weight; all of them share one."""
        if not address.key.endswith("weight"):  # a bias, or a matrix of an adapter
            return
        if self._empty is None:
            self._empty = self._write([None])
        index, counts = address.index or (0,), address.counts or (1,)
        key = f"{address.key.removesuffix('weight')}_extra_state/shard_{_dotted(index)}_{_dotted(counts)}"
        self._entries[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = self._empty

    def _write(self, saved: object) -> _StorageInfo:
        nbytes = saved.nbytes if isinstance(saved, Tensor) else 0
        if self._file is not None and self._file.tell() + nbytes > self._limit:
            self._close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        start = self._file.tell()
        try:
            torch.save(saved, self._file)
        except RuntimeError as error:  # torch's error for a full disk does not name the cause
            free = shutil.disk_usage(self._folder).free / 1e9
            raise WeightsError(f"{self._file.name} cannot be written; {free:.2f} GB of its disk are free") from error
        return _StorageInfo(Path(self._file.name).name, start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._report(Path(self._file.name), self._file.tell())
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Write the files that Megatron looks for first; `.metadata` last, as Megatron does."""
        self._close()
        write_frame(self._folder, 0)
        metadata = Metadata(self._entries, {}, self._places, StorageMeta(), CURRENT_DCP_VERSION)
        (self._folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
