"""Splitting a pack over context-parallel ranks: each holds a range of its rows, chosen so that all have equal work."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from asyncrl.algo.balance import TOKEN, Costs
from asyncrl.algo.pack import Branch, Pack


def bounds_of(pack: Pack, parts: int, multiple: int, costs: Costs) -> tuple[int, ...]:
    """Return the first row of each part, and the end. Parts have about equal cost, not equal numbers of rows: a row
    attends to as many others as its position says. Each part has a multiple of `multiple` rows, and the pack has at
    least that many rows for each part."""
    rows = np.full(pack.num_tokens, TOKEN, np.int64) + (pack.positions.numpy() + 1) * costs.pair
    rows[pack.logit_rows.numpy()] += costs.row
    spent = np.cumsum(rows)
    found = [0]
    for part in range(1, parts):
        fair = int(np.searchsorted(spent, int(spent[-1]) * part // parts))
        nearest = (fair + multiple // 2) // multiple * multiple
        found.append(min(max(nearest, found[-1] + multiple), pack.num_tokens - (parts - part) * multiple))
    return (*found, pack.num_tokens)


def part(pack: Pack, bounds: tuple[int, ...], number: int) -> Pack:
    """Return part `number` of the pack: its own tokens, logits and targets, but all rows of the table, because the
    log-probabilities of all parts are gathered."""
    first, last = bounds[number : number + 2]
    target_rows = pack.logit_rows[pack.row_of_target]
    own = ((target_rows >= first) & (target_rows < last)).nonzero().flatten()
    logit_rows, row_of_target = torch.unique(target_rows[own] - first, return_inverse=True)
    return replace(
        pack,
        token_ids=pack.token_ids[first:last],
        branches=cut(pack.branches, bounds),
        logit_rows=logit_rows if len(logit_rows) else logit_rows.new_zeros(1),
        row_of_target=row_of_target,
        targets=pack.targets[own],
        own_targets=own,
        bounds=bounds,
        part=number,
        rope=None if pack.rope is None else pack.rope[:, first:last],
        keys=None if pack.keys is None else pack.keys[first:last],
    )


def cut(branches: Sequence[Branch], bounds: Sequence[int]) -> tuple[Branch, ...]:
    """Split branches at the bounds, which ascend, so that none crosses one. The later piece of a split branch is a
    descendant of the earlier one."""
    found: list[Branch] = []
    above: list[int] = []  # where the branches that contain the next one end
    for branch in branches:
        inner = bounds[bisect_right(bounds, branch.begin) : bisect_left(bounds, branch.end)]
        for begin, end in pairwise([branch.begin, *inner, branch.end]):
            while above and above[-1] <= begin:
                above.pop()
            found.append(Branch(begin, end, branch.leave, len(above)))
            above.append(branch.leave)
    return tuple(found)
