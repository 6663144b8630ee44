"""Sampling on a CPU: replacements for two functions of SGLang, installed by the shim (cpu.py)."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def sample(probabilities: Tensor) -> Tensor:
    """Draw one token from each row of probabilities [N, V] by inverting the cumulative distribution -> int32 [N].

    torch.multinomial, which SGLang uses, draws an exponential number for each entry of the vocabulary: 73 ms for 64
    rows of 49,152 on one AVX2 core, against 5 ms here. The sums are float64 so that no token of the tail is lost.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    drawn = torch.rand(total.shape, dtype=torch.float64, device=total.device) * total
    below = torch.minimum(drawn, torch.nextafter(total, torch.zeros_like(total)))  # rounding may reach the total
    return torch.searchsorted(cumulative, below, right=True).view(-1).to(torch.int32)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Hash seeds [N], positions [N] and columns [M] -> int64 [N, M], each below 2^32.

    The hash is 32-bit MurmurHash3 (A. Appleby, public domain) of the seed's two halves, the position and the column.
    SGLang derives the random numbers of a request with a sampling_seed from this hash, but implements it only as a
    compiled kernel.
    """
    seed = seed.to(torch.int64)[:, None]
    blocks = (seed & LOW, (seed >> 32) & LOW, positions.to(torch.int64)[:, None] & LOW, columns.to(torch.int64)[None])
    state = torch.zeros((), dtype=torch.int64, device=seed.device)
    for block in blocks:
        mixed = (_rotated((block * 0xCC9E2D51) & LOW, 15) * 0x1B873593) & LOW
        state = (_rotated(state ^ mixed, 13) * 5 + 0xE6546B64) & LOW
    state = state ^ 16  # length of the input in bytes
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    return state ^ (state >> 16)


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & LOW
