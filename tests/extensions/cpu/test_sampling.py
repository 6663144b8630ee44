"""Sampling follows the distribution, and the hash behind seeds is MurmurHash3."""

from __future__ import annotations

import struct

import pytest
import torch

from asyncrl.extensions.cpu.sampling import murmur_hash32, sample


def rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as its author wrote it, for whole blocks."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        mixed = rotated(block * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state ^ mixed, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & 0xFFFFFFFF
    return state ^ (state >> 16)


def test_reference_itself() -> None:
    assert murmur3(b"") == 0
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B  # of the smhasher's published vectors


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**40 + 17, 2**63 - 1])
def test_hash_is_that_of_seed_position_and_column(seed: int) -> None:
    positions, columns = torch.tensor([0, 3, 2**31 - 1]), torch.arange(70)
    found = murmur_hash32(torch.full((3,), seed), positions, columns)
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns.tolist()]
        for position in positions.tolist()
    ]
    assert found.tolist() == expected


def test_gumbel_maximum_is_drawn_with_its_probability() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    uniform = murmur_hash32(torch.full((20_000,), 7), torch.arange(20_000), torch.arange(4)).double() / (2**32 - 1)
    gumbels = -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-12)))
    drawn = (probabilities.log() + gumbels).argmax(1).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn.double(), probabilities, rtol=0, atol=0.01)


def test_sampling_by_inversion_follows_the_distribution() -> None:
    torch.manual_seed(3)
    p = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25, 0.0])
    drawn = sample(p.expand(40_000, -1))
    assert drawn.dtype == torch.int32
    shares = torch.bincount(drawn, minlength=6) / 40_000
    torch.testing.assert_close(shares, p, atol=0.01, rtol=0)
    assert shares[1] == shares[5] == 0  # what has no probability is never drawn


def test_sampling_reaches_the_rare_tokens_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cumulative sum stops growing in float32, so without care the tail would never be sampled."""
    p = torch.full((1, 1 << 17), 2.0**-26)
    p[0, 0] = 1 - 2.0**-9  # the others together: 2^-9
    rare = torch.tensor([1, 2, 1000, 65_536, (1 << 17) - 1])
    numbers = (1 - 2.0**-9 + (rare.double() - 0.5) * 2.0**-26) / (1 - 2.0**-26)  # of their sum
    monkeypatch.setattr(torch, "rand", lambda *_, **__: numbers[:, None])
    assert sample(p.expand(len(rare), -1)).tolist() == rare.tolist()


def test_rows_are_drawn_independently() -> None:
    torch.manual_seed(3)
    drawn = sample(torch.eye(5)[[4, 0, 2]])
    assert drawn.tolist() == [4, 0, 2]
