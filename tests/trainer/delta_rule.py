"""A prototype of the gated delta rule over packs, which no model uses (results/designs/gated_delta_net.md).

A head has a state S [d, e], which each token of a sequence changes (arXiv 2412.06464, equation 10):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        out_t = S_t^T q_t

Chunks of a branch are computed at once, but for their states (section 3.3). The chunks of all branches that are equally
many chunks after the beginning of their sequences are one wave, which takes its states from the wave before: where
sequences part, a state goes to every branch below. Autograd sums what these give back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from asyncrl.algo.pack import Branch, Pack

CHUNK = 64


@dataclass(frozen=True)
class Waves:
    """The chunks of a pack, wave after wave."""

    rows: Tensor  # [chunks, CHUNK] their rows, padded with 0
    spare: Tensor  # [chunks, CHUNK] bool: padding
    sizes: list[int]  # chunks of each wave
    before: Tensor  # [chunks] the chunk before each, numbered in the wave before; -1 at the beginning of a sequence


def above(branches: tuple[Branch, ...]) -> Iterator[int]:
    """Yield the number of the branch above each branch, or -1."""
    path: list[int] = []
    for number, branch in enumerate(branches):
        del path[branch.depth :]
        yield path[-1] if path else -1
        path.append(number)


def waves_of(pack: Pack, size: int = CHUNK) -> Waves:
    """Cut the branches of a pack into chunks."""
    ends: list[int] = []  # the last chunk of each branch
    spans: list[tuple[int, int, int, int]] = []  # wave, first row, end, chunk before
    for branch, parent in zip(pack.branches, above(pack.branches), strict=True):
        last = ends[parent] if parent >= 0 else -1
        for begin in range(branch.begin, branch.end, size):
            wave = spans[last][0] + 1 if last >= 0 else 0
            spans.append((wave, begin, min(begin + size, branch.end), last))
            last = len(spans) - 1
        ends.append(last)
    order = sorted(range(len(spans)), key=lambda chunk: spans[chunk][0])
    sizes = [0] * (spans[order[-1]][0] + 1)
    place = {-1: -1}
    for chunk in order:
        place[chunk] = sizes[spans[chunk][0]]
        sizes[spans[chunk][0]] += 1
    first, end = (torch.tensor([spans[chunk][which] for chunk in order]) for which in (1, 2))
    rows = first[:, None] + torch.arange(size)
    spare = rows >= end[:, None]
    before = torch.tensor([place[spans[chunk][3]] for chunk in order])
    return Waves(rows.masked_fill(spare, 0), spare, sizes, before)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, waves: Waves) -> Tensor:
    """Compute the outputs of a pack: q and k [N, h, d] of length 1, v [N, h, e], g and beta [N, h] -> [N, h, e]."""
    scaled = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (_chunked(x, waves) for x in (scaled, k, v, g[..., None], beta[..., None]))
    g = g.cumsum(-2)  # [C, h, c, 1]
    decay = (g - g.mT).tril().exp().tril()
    # Each row's correction depends on those before it in the chunk: (1 + A) x = y.
    a = (beta * k @ k.mT * decay).tril(-1)
    right = torch.cat([beta * v, beta * k * g.exp()], -1)
    new, of_state = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores, last = q @ k.mT * decay, g[..., -1:, :]
    reading, writing, keeping = q * g.exp(), (k * (last - g).exp()).mT, last.exp()
    outputs = []
    states = k.new_zeros(0, k.shape[1], k.shape[-1], v.shape[-1])
    per_wave = (x.split(waves.sizes) for x in (new, of_state, scores, reading, writing, keeping, waves.before))
    for mine, erased, weights, read, write, keep, before in zip(*per_wave, strict=True):
        states = torch.cat([states.new_zeros(1, *states.shape[1:]), states])[before + 1]
        changes = mine - erased @ states
        outputs.append(read @ states + weights @ changes)
        states = keep * states + write @ changes
    found = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [C * c, h, e]
    real = ~waves.spare.flatten()
    return found.new_empty(int(real.sum()), *found.shape[1:]).index_copy(0, waves.rows.flatten()[real], found[real])


def _chunked(x: Tensor, waves: Waves) -> Tensor:
    """Lay rows out by chunk, with zeros as padding: [N, h, n] -> [C, h, c, n]."""
    return x[waves.rows].masked_fill(waves.spare[..., None, None], 0.0).transpose(1, 2)


def rows_before(pack: Pack) -> Tensor:
    """Return the row before each one in its sequence, or -1."""
    found = torch.arange(-1, pack.num_tokens - 1)
    ends = [branch.end - 1 for branch in pack.branches]
    for branch, parent in zip(pack.branches, above(pack.branches), strict=True):
        found[branch.begin] = ends[parent] if parent >= 0 else -1
    return found


def convolved(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Compute the causal convolution of each feature, [N, f], with its weight [f, taps], along the sequences."""
    out, at = x * weight[:, -1], before
    for tap in range(weight.shape[1] - 2, -1, -1):
        there = at >= 0
        out = out + torch.where(there[:, None], x[at.clamp(min=0)], 0.0) * weight[:, tap]
        at = torch.where(there, before[at.clamp(min=0)], -1)
    return out


def apart(pack: Pack) -> tuple[Tensor, Tensor, Pack]:
    """Return the rows of all sequences one after the other, the place of each row of the pack among them, and a pack
    that shares nothing: for kernels that know no tree."""
    parents = [*above(pack.branches)]
    rows: list[int] = []
    bounds = [0]
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        for number in reversed(path):
            rows += range(pack.branches[number].begin, pack.branches[number].end)
        bounds.append(len(rows))
    place = torch.empty(pack.num_tokens, dtype=torch.int64)
    place[torch.tensor(rows)] = torch.arange(len(rows))
    branches = tuple(Branch(begin, end, end, 0) for begin, end in pairwise(bounds))
    index = torch.tensor(rows)
    fields = {name: getattr(pack, name) for name in ("logit_rows", "row_of_target", "targets", "table_rows")}
    flat = Pack(pack.token_ids[index], pack.positions[index], index, branches, **fields, tokens_apart=len(rows))
    return index, place, flat
