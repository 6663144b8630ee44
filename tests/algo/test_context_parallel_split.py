"""A pack cut over ranks: each row once, about the same cost, and every trained token predicted by one rank."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.balance import TOKEN, Costs
from asyncrl.algo.context_parallel_split import bounds_of, cut, part
from asyncrl.algo.pack import pack
from asyncrl.algo.samples import Sample
from tests.algo.packs import packs

COSTS = Costs(pair=TOKEN // 50, row=TOKEN)


@given(packs(), st.integers(1, 4), st.sampled_from([1, 2]))
@settings(max_examples=200)
def test_parts_hold_every_row_and_every_trained_token_once(case: tuple, parts: int, multiple: int) -> None:
    groups, share, _ = case
    whole = pack(groups, share=share, multiple=parts * multiple)
    bounds = bounds_of(whole, parts, multiple, COSTS)
    assert all((b - a) % multiple == 0 < b - a for a, b in pairwise(bounds))
    found = [part(whole, bounds, number) for number in range(parts)]
    assert torch.cat([p.token_ids for p in found]).equal(whole.token_ids)
    assert torch.cat([p.own_positions for p in found]).equal(whole.positions)
    own = torch.cat([p.own_targets for p in found])
    assert sorted(own.tolist()) == list(range(len(whole.targets)))
    assert torch.cat([p.targets for p in found]).equal(whole.targets[own])
    predicted_from = torch.cat([p.logit_rows[p.row_of_target] + p.rows[0] for p in found])
    assert predicted_from.equal(whole.logit_rows[whole.row_of_target][own])
    for p in found:
        assert p.num_tokens == whole.num_tokens
        assert p.table_rows.equal(whole.table_rows)
        assert len(p.logit_rows) > 0
        assert p.logit_rows.max() < len(p.token_ids)


@given(packs(), st.integers(1, 4))
def test_cut_branches_are_the_same_tree(case: tuple, parts: int) -> None:
    groups, share, _ = case
    whole = pack(groups, share=share, multiple=parts)
    bounds = bounds_of(whole, parts, 1, COSTS)
    branches = cut(whole.branches, bounds)
    assert [row for b in branches for row in range(b.begin, b.end)] == list(range(whole.num_tokens))
    for number, b in enumerate(branches):
        assert (whole.ends[b.begin : b.end] == b.leave).all()
        assert b.depth == sum(a.end <= b.begin < a.leave for a in branches[:number])
        assert not any(b.begin < bound < b.end for bound in bounds)


def test_parts_of_a_long_sequence_cost_the_same() -> None:
    """Equal numbers of rows would give the last of four parts nearly twice the mean."""
    whole = pack([[Sample([0] * 8, [1] * 4000, [True] * 4000, 0, 0)]])
    costs = Costs(pair=TOKEN // 1000, row=0)
    bounds = bounds_of(whole, 4, 1, costs)
    spent = [(b - a) * TOKEN + sum(position + 1 for position in range(a, b)) * costs.pair for a, b in pairwise(bounds)]
    assert max(spent) < 1.002 * sum(spent) / 4
