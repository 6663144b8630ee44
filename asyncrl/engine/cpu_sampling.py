"""The hash that SGLang draws a request's random numbers from (sampling_seed), of which its CPU build is a kernel.

MurmurHash3 (A. Appleby, public domain), 32 bits, of the seed's two halves, the position and the column, in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Seeds [N], positions [N] and columns [M] -> int64 [N, M] below 2^32; each a function of its three numbers."""
    seed = seed.to(torch.int64)[:, None]
    blocks = (seed & LOW, (seed >> 32) & LOW, positions.to(torch.int64)[:, None] & LOW, columns.to(torch.int64)[None])
    state = torch.zeros((), dtype=torch.int64, device=seed.device)
    for block in blocks:
        mixed = (_rotated((block * 0xCC9E2D51) & LOW, 15) * 0x1B873593) & LOW
        state = (_rotated(state ^ mixed, 13) * 5 + 0xE6546B64) & LOW
    state = state ^ 16  # bytes
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    return state ^ (state >> 16)


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & LOW
