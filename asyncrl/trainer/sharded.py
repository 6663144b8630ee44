"""Sharded state of a network and its optimizer, in a folder that all ranks write and read, in Megatron's torch_dist
format.

A parameter is saved once, in float32: its master value, under the key of Megatron's model. Its moments are saved under
`optimizer.exp_avg.KEY` and `optimizer.exp_avg_sq.KEY`. A checkpoint is thus independent of the layout, the precision
and the kind of optimizer that wrote it. (Megatron's own optimizer state can be loaded neither under another expert
parallelism nor into an optimizer that is not distributed.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks

from asyncrl.checkpoints.torch_dist import read_metadata
from asyncrl.errors import RecordError
from asyncrl.trainer.moments import MOMENTS
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.sharding import Box, PlacedTensor


@dataclass(frozen=True)
class TensorShard:
    """A tensor of this rank, and its box in the whole tensor."""

    key: str
    box: Box
    tensor: Tensor  # has the size of the box


class ShardedState:
    """A network with its optimizer, as the pieces that this rank writes or reads."""

    def __init__(
        self,
        network: Network,
        optimizer: NetworkOptimizer,
        readable: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """`readable` returns where the elements of a tensor can be read, if they are not on the device."""
        self._network = network
        self._optimizer = optimizer
        self._readable = readable

    def written(self) -> Iterator[TensorShard]:
        """Yield the pieces that this rank writes. Each element of the whole is written by one rank."""
        places = {id(place.tensor): place for place in self._network.placed}
        for shard in self._optimizer.shards():
            place = places[id(shard.parameter)]
            if place.ours if self._network.sharded else place.first:
                values = {"": shard.master, **_moments(shard.moments)}
                yield from _pieces(place, shard.start, {name: self._readable(one) for name, one in values.items()})
        for place in places.values():
            if place.first and not isinstance(place.tensor, torch.nn.Parameter):  # a buffer
                yield from _pieces(place, 0, {"": place.tensor.detach().view(-1)})

    def weights(self) -> Iterator[TensorShard]:
        """Yield the weights that this rank computes with, in their own precision, without a frozen base."""
        for place in self._network.placed:
            if isinstance(place.tensor, torch.nn.Parameter) and not place.tensor.requires_grad:
                continue
            yield from _pieces(place, 0, {"": place.tensor.detach().view(-1)})

    def states(self) -> Iterator[TensorShard]:
        """Yield the state of this rank's optimizer. In float32 a weight is its own master."""
        places = {id(place.tensor): place for place in self._network.placed}
        for shard in self._optimizer.shards():
            masters = {"": shard.master} if _apart(shard.master, shard.parameter) else {}
            yield from _pieces(places[id(shard.parameter)], shard.start, {**masters, **_moments(shard.moments)})

    def load(self, folder: Path) -> None:
        """Load what `write` saved under any layout. Raises RecordError."""
        read(folder, list(self.weights()))
        read(folder, list(self.states()))


def _moments(moments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"optimizer.{name}.": moments[name] for name in MOMENTS}


def _apart(master: Tensor, parameter: Tensor) -> bool:
    return master.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()


def _pieces(place: PlacedTensor, start: int, flat: dict[str, Tensor]) -> Iterator[TensorShard]:
    """Yield the pieces of flat tensors, given by key prefix, that hold the elements from `start` on."""
    end = start + len(next(iter(flat.values())))
    for box in place.boxes:
        for part in box.within(start, end):
            for prefix, values in flat.items():
                first = part.start - start
                yield TensorShard(prefix + part.key, part, values[first : first + part.numel].view(part.size))


class StagedCopy:
    """A reusable copy of pieces in host memory, which is written while training continues."""

    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        pinned = any(piece.tensor.is_cuda for piece in pieces)
        # zeros, so that the memory is already touched at the first copy, as it is at all later ones
        self.pieces = [
            replace(piece, tensor=torch.zeros(piece.box.size, dtype=piece.tensor.dtype, pin_memory=pinned))
            for piece in pieces
        ]

    @property
    def nbytes(self) -> int:
        """Size of this rank's copy in bytes."""
        return sum(piece.tensor.nbytes for piece in self.pieces)

    def copy(self, pieces: Sequence[TensorShard]) -> None:
        """Copy the current values of the same pieces."""
        for own, piece in zip(self.pieces, pieces, strict=True):
            assert (own.key, own.box) == (piece.key, piece.box), f"{own.key} is at another place now"
            own.tensor.copy_(piece.tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def write(folder: Path, pieces: Sequence[TensorShard], group: dist.ProcessGroup | None) -> None:
    """Write the pieces. Collective over `group`. Raises torch's CheckpointException on every rank if one of them
    fails."""
    save_chunks({}, storage_writer=FileSystemWriter(folder), planner=_Writing(pieces), process_group=group)


def read(folder: Path, pieces: Sequence[TensorShard]) -> None:
    """Fill the pieces from a folder. Raises RecordError if the folder is damaged or holds another model."""
    metadata = read_metadata(folder)
    by_key: defaultdict[str, list[TensorShard]] = defaultdict(list)
    for piece in pieces:
        by_key[piece.key].append(piece)
    items = [item for key, wanted in by_key.items() for item in _items(folder, metadata, key, wanted)]
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(LoadPlan(items), _Filling(pieces)).wait()
    except (OSError, RuntimeError, KeyError, ValueError, AssertionError) as error:
        raise RecordError(f"{folder} cannot be read: {type(error).__name__}: {error}") from None


def _items(folder: Path, metadata: Metadata, key: str, wanted: Sequence[TensorShard]) -> list[ReadItem]:
    """Return what to read of a key, after checking that all of it is there."""
    entry, whole = metadata.state_dict_metadata.get(key), wanted[0].box.whole
    if not isinstance(entry, TensorStorageMetadata):
        raise RecordError(f"{folder} has no {key}: it belongs to another model, or to another algo.advantage")
    if tuple(entry.size) != whole:
        raise RecordError(f"{key} in {folder} has shape {tuple(entry.size)}, and {whole} in this model")
    items = planner_helpers.create_read_items_for_chunk_list(key, entry, [_chunk(piece.box) for piece in wanted])
    found, sought = sum(math.prod(item.lengths) for item in items), sum(piece.box.numel for piece in wanted)
    if found != sought:
        raise RecordError(f"{folder} holds {found} of {sought} elements of {key}")
    return items


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))


class _Writing(DefaultSavePlanner):
    """The save planner: tells torch what this rank writes."""

    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = _by_place(pieces)
        self._items = [
            WriteItem(
                MetadataIndex(piece.key, piece.box.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(piece.box),
                    TensorProperties(dtype=piece.tensor.dtype),
                    torch.Size(piece.box.whole),
                ),
            )
            for piece in pieces
        ]

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank's pieces."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Combine all plans. Raises RuntimeError unless every element is saved exactly once."""
        plans, metadata = create_default_global_save_plan(all_plans)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                if held != math.prod(entry.size):
                    raise RuntimeError(f"{held} of {math.prod(entry.size)} elements of {key} would be saved")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of a piece."""
        return self._tensors[index]


class _Filling(DefaultLoadPlanner):
    """The load planner: tells torch where to put what was read. The copy converts the precision."""

    def __init__(self, pieces: Sequence[TensorShard]) -> None:
        super().__init__()
        self._tensors = _by_place(pieces)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of a piece."""
        return self._tensors[index]


def _by_place(pieces: Sequence[TensorShard]) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(piece.key, piece.box.offset): piece.tensor for piece in pieces}
