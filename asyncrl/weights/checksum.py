"""The checksums that an SGLang engine must answer to POST /weights_checker {"action": "checksum"}, computed from the HF
tensors sent.

The engine hashes its own fused, padded parameters on every rank; engine_layout.py describes how they
are built from HF tensors. Nothing is assembled here: each part is added to its ranks' running hashes in order, and only
the parts that arrive early are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asyncrl.errors import EngineError, WeightsError
from asyncrl.models.parts import EMBEDDING, HEAD
from asyncrl.parallel import EngineParallel
from asyncrl.schema import POLICY
from asyncrl.weights.engine_layout import EngineLayout, ParameterTarget
from asyncrl.weights.layouts import Pieces

TOWER = "visual."
"""Beginning of the names of a vision tower's parameters in every engine."""
AXES = ".rotary_emb.axis_map"
"""End of the names of what SGLang computes from the config: which of three positions turns each rotated pair."""
QUESTION = "/weights_checker", {"action": "checksum", "selector": "target"}
"""Path and body of the request for an engine's checksums; a draft model changes no token."""
Checksums = list[dict[str, str]]
"""A hash by engine parameter name, for each rank."""


class CpuHash:
    """SGLang's `tensor_hash` of a CPU tensor (sglang/srt/managers/mm_utils.py): the first 8 bytes of SHA-256."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, tensor: Tensor) -> None:
        """Add a tensor's bytes, without a copy if the tensor is contiguous and on the CPU."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._sha.update(flat.view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """Return the digits in big-endian order, as the engine prints them."""
        return self._sha.hexdigest()[:16]


class CudaHash:
    """SGLang's `gpu_tensor_hash` (sglang/kernels/ops/memory/gpu_tensor_hash.py) in torch, on the tensors' own device.

    A murmur-like mix of every 32-bit word with its position is summed over tiles of 8192 words. Each tile's two sums
    are mixed with the total length, and the tiles' results are summed. Temporary memory stays below 256 MiB.
    """

    def __init__(self) -> None:
        self._tail = torch.empty(0, dtype=torch.uint8)
        self._sums: list[Tensor] = []
        self._words = 0

    def update(self, tensor: Tensor) -> None:
        """Mix whole tiles at once, and keep the remaining bytes for the next call."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for chunk in flat.split(TILES_AT_ONCE * TILE_BYTES):
            aligned = torch.cat([self._tail.to(chunk.device), chunk])
            whole = aligned.numel() // TILE_BYTES * TILE_BYTES
            self._tail = aligned[whole:].clone()
            self._mix(aligned[:whole].view(torch.int32).view(-1, TILE_WORDS))

    def _mix(self, words: Tensor) -> None:
        """Mix words, int32 [tiles, words per tile], into two sums for each tile."""
        value = words.to(torch.int64) & MASK
        place = torch.arange(self._words, self._words + words.numel(), device=words.device).view_as(value) & MASK
        self._words += words.numel()
        first = _fmix32(value ^ ((place * POSITION[0] + SEEDS[0]) & MASK) ^ _rotl32(place, 15))
        second = _fmix32(value ^ ((place * POSITION[1] + SEEDS[1]) & MASK) ^ _rotl32(place, 13))
        self._sums.append(torch.stack([first.sum(1), second.sum(1)], 1) & MASK)

    def hexdigest(self) -> str:
        """Finish the hash: the last bytes are padded with zeros to 32 bits."""
        if self._tail.numel():
            padding = self._tail.new_zeros(-self._tail.numel() % 4)
            self._mix(torch.cat([self._tail, padding]).view(torch.int32).view(1, -1))
            self._tail = padding[:0]  # so that it may be called again, for another rank with the same bytes
        if not self._words:
            return f"{0:016x}"
        mixed = _fmix32(torch.cat(self._sums) ^ (self._words * 4 & MASK))
        return f"{_splitmix64(int(((mixed[:, 0] << 32) | mixed[:, 1]).sum().item())):016x}"


MASK, MASK64 = (1 << 32) - 1, (1 << 64) - 1
TILE_WORDS = 8192
TILE_BYTES = 4 * TILE_WORDS
TILES_AT_ONCE = 256
POSITION = (0x27D4EB2D, 0x165667B1)
SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & MASK)


def _rotl32(x: Tensor, by: int) -> Tensor:
    return (x << by | x >> (32 - by)) & MASK


def _fmix32(x: Tensor) -> Tensor:
    """Apply murmur's finalizer: unsigned 32-bit arithmetic in int64, whose products overflow only above the bits that
    are kept."""
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
    return x ^ x >> 16


def _splitmix64(x: int) -> int:
    x &= MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


Hash = CpuHash | CudaHash
"""A hash over the concatenated bytes of tensors, which are not kept."""
HASHES: dict[str, Callable[[], Hash]] = {"cpu": CpuHash, "cuda": CudaHash}


class _Parameter:
    """An engine parameter that is not complete yet."""

    def __init__(self, hashes: list[Hash]) -> None:
        self.hashes = hashes
        self.turn = 0
        self.early: dict[int, tuple[str, Tensor]] = {}
        """HF name and tensor by index, of the parts that arrived early."""


class ExpectedChecksums:
    """Checksums expected for the HF tensors of one publish, or of one pipeline stage, added in any order.

    `hf` is the model's config.json. `dtype` is the dtype that the engine was started with (a weight sent in another
    dtype is converted, as the engine does). `device` is where the engine runs: hash and padding depend on it.
    """

    def __init__(
        self, hf: dict[str, Any], shape: EngineParallel, *, dtype: torch.dtype, device: Literal["cpu", "cuda"] = "cpu"
    ) -> None:
        self._layout = EngineLayout(hf, shape, cpu=device == "cpu")
        self._dtype = dtype
        self._new_hash = HASHES[device]
        self._open: dict[str, _Parameter] = {}
        self._done: Checksums = [{} for _ in range(shape.ranks)]

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add one full HF tensor. It may be overwritten afterwards: a tensor that arrives early is copied.

        Raises WeightsError with the name of a tensor that the engine has no place for, that was added before, or that
        is not divisible.
        """
        if name == HEAD and self._layout.tied:
            return  # the engine skips it and has no such parameter, or a copy of the embedding
        self._add(name, tensor)
        if name == EMBEDDING and self._layout.tied and self._layout.split.shape.pp > 1:
            self._add(HEAD, tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        place = self._layout.find(name)
        under_way = self._open.get(place.parameter)
        if place.parameter in self._done[place.ranks[0]] or (
            under_way and (place.index < under_way.turn or place.index in under_way.early)
        ):
            raise WeightsError(f"{name} was added twice; use a new ExpectedChecksums for each version")
        if under_way is None:
            count = 1 if place.rule.same_everywhere else len(place.ranks)
            under_way = self._open[place.parameter] = _Parameter([self._new_hash() for _ in range(count)])
        self._take(name, place, under_way, tensor)

    def _take(self, name: str, place: ParameterTarget, under_way: _Parameter, tensor: Tensor) -> None:
        under_way.early[place.index] = name, tensor
        while under_way.turn in under_way.early:
            came, part = under_way.early.pop(under_way.turn)
            if part.is_floating_point():
                part = part.to(place.rule.dtype or self._dtype)
            for rank, running in zip(place.ranks, under_way.hashes, strict=False):
                try:
                    held = self._layout.part(place, under_way.turn, part, rank)
                except ValueError as error:
                    raise WeightsError(f"{place.parameter}, from {came} {tuple(part.shape)}: {error}") from None
                if held is not None:
                    running.update(held)
            under_way.turn += 1
        if place.index in under_way.early:
            under_way.early[place.index] = name, tensor.clone()
        if under_way.turn == place.count:
            del self._open[place.parameter]
            for number, rank in enumerate(place.ranks):
                self._done[rank][place.parameter] = under_way.hashes[number % len(under_way.hashes)].hexdigest()

    def result(self) -> Checksums:
        """Return the checksums. Raises WeightsError with the names of the fused parameters that are incomplete."""
        if self._open:
            raise WeightsError(f"incomplete, because HF tensors are missing: {', '.join(sorted(self._open))}")
        return self._done


class SentWeights(Protocol):
    """The weights that a publisher sends: those of a Resharder, or what an extension makes of them."""

    @property
    def checksums(self) -> type[ExpectedChecksums]:
        """Return the class of what engines answer that hold these weights."""
        ...

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        """Yield name, dtype and shape of what `stream` yields."""
        ...

    def stream(self, *, merged: str | None = POLICY) -> Iterator[tuple[str, Pieces]]:
        """Yield (HF name, full tensor), as Resharder.stream."""
        ...

    def figures(self) -> dict[str, float]:
        """Return metrics of what was sent last."""
        ...


def merge(stages: Sequence[Checksums]) -> Checksums:
    """Merge the results of the trainer's pipeline stages. Raises WeightsError if two stages hold the same parameter."""
    merged: Checksums = [{} for _ in stages[0]]
    for stage in stages:
        for whole, part in zip(merged, stage, strict=True):
            if twice := whole.keys() & part.keys():
                raise WeightsError(f"two pipeline stages hold {', '.join(sorted(twice))}")
            whole.update(part)
    return merged


def parse(answer: dict[str, Any]) -> Checksums:
    """Parse the engine's answer, in order of rank.

    Each replica of attention answers for all ranks. Raises EngineError if they contradict each other, or if ranks are
    missing.
    """
    by_rank: dict[int, dict[str, str]] = {}
    for rank in answer.get("ranks") or []:
        place = rank["parallelism_info"][0]
        number = place.get("pp_rank", 0) * place.get("tp_size", 1) + place["tp_rank"]
        if by_rank.setdefault(number, rank["checksums"]) != rank["checksums"]:
            raise EngineError(f"/weights_checker returned two sets of checksums for rank {number}: {str(answer)[:200]}")
    if not by_rank or sorted(by_rank) != list(range(len(by_rank))):
        raise EngineError(
            f"/weights_checker returned checksums of an invalid set of ranks: {sorted(by_rank)}: {str(answer)[:200]}"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def differing(expected: Checksums, answered: Checksums) -> list[str]:
    """Return the names of the engine parameters whose hashes differ on some rank, or that only one side has.

    Nothing is left out but what was not sent of a vision tower (all of it, if it is frozen, or its rotary frequencies),
    and the axes of its text model's positions. SGLang itself skips the rotary caches of text models, which are their
    only tensors that are not weights.
    """
    if len(expected) != len(answered):
        raise WeightsError(f"checksums of {len(expected)} ranks are expected, but the engine reported {len(answered)}")
    return sorted(
        {
            name
            for mine, its in zip(expected, answered, strict=True)
            for name in mine.keys() | its.keys()
            if mine.get(name) != its.get(name) and (name in mine or not (name.startswith(TOWER) or name.endswith(AXES)))
        }
    )
