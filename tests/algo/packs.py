"""Groups of samples, drawn, to be packed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import Sample

VOCAB = 23
Groups = list[list[Sample]]


@st.composite
def packs(draw: st.DrawFn) -> tuple[Groups, bool, int]:
    """Groups with or without a common beginning, siblings with common turns, masked observations, equal, one-token and
    empty answers."""
    rng = draw(st.randoms(use_true_random=False))
    common = words(rng, draw(st.sampled_from([0, 1, 3, 8, 30])))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = common + words(rng, rng.randint(1, 5))
        turn = words(rng, draw(st.sampled_from([0, 0, 1, 6, 20])))
        told = [rng.random() < 0.5 for _ in turn]
        group = [_sample(prompt, turn, told, rng) for _ in range(rng.randint(1, 5))]
        groups.append([*group, group[0]] if rng.random() < 0.3 else group)
    if not trained(groups):
        groups[0].append(sample(groups[0][0].prompt_ids, [1, 2]))
    return numbered(groups), draw(st.booleans()), draw(st.sampled_from([1, 2, 4, 7]))


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def _sample(prompt: list[int], turn: list[int], told: list[bool], rng: random.Random) -> Sample:
    """Some start with the group's common turn; few different words, so that siblings share some by chance."""
    turn, told = (turn, told) if rng.random() < 0.7 else ([], [])
    rest = [rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 2, 5, 8]))]
    return Sample(prompt, turn + rest, told + [rng.random() < 0.8 for _ in rest], 0, 0)


def numbered(groups: Groups) -> Groups:
    """The same samples at their rows of a table, with some rows between that are of others."""
    row, found = 3, []
    for group in groups:
        found.append([])
        for one in group:
            found[-1].append(replace(one, first_row=row))
            row += one.num_trained + 2
    return found


def trained(groups: Groups) -> list[tuple[Sample, int]]:
    return [(s, t) for group in groups for s in group for t, chosen in enumerate(s.mask) if chosen]


def sample(prompt: list[int], tokens: list[int], first_row: int = 0) -> Sample:
    return Sample(prompt, tokens, [True] * len(tokens), 0, first_row)


def dense(
    q: Tensor, k: Tensor, v: Tensor, p: Pack, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """The definition, with a mask of rows by rows."""
    row = torch.arange(p.num_tokens)
    seen = (row <= row[:, None]) & (row[:, None] < p.ends)
    if window is not None:
        seen &= p.positions[:, None] - p.positions < window
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(row), 1)], -1)
    return torch.einsum("hnm,mhe->nhe", scores.softmax(-1)[..., : len(row)], v)
