"""A pack is worth exactly what its sequences are worth one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.pack import Pack, common_beginning, inputs, pack, tree_segments
from asyncrl.algo.samples import Sample
from tests.algo.packs import packs, sample, trained
from tests.examples import examples


def seen_rows(p: Pack) -> list[list[int]]:
    """Rows that each row attends to."""
    row = torch.arange(p.num_tokens)
    seen = (row <= row[:, None]) & (row[:, None] < p.ends)
    return [line.nonzero().flatten().tolist() for line in seen]


@given(packs())
@settings(max_examples=examples(80))
def test_every_trained_token_is_predicted_from_its_own_past(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    seen = seen_rows(p)
    expected = trained(groups)
    assert p.targets.tolist() == [s.token_ids[t] for s, t in expected]
    for (one, t), row in zip(expected, p.logit_rows[p.row_of_target].tolist(), strict=True):
        context = [(p.positions[r].item(), p.token_ids[r].item()) for r in seen[row]]
        sequence = [*one.prompt_ids, *one.token_ids[:t]]
        assert context == list(enumerate(sequence))  # every position once, each with its token
        assert p.positions[row].item() == len(sequence) - 1


@given(packs())
@settings(max_examples=examples(80))
def test_every_row_sees_a_whole_beginning_that_ends_in_itself(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    seen = seen_rows(p)
    for row in range(pack(groups, share=share).num_tokens):
        assert [p.positions[r].item() for r in seen[row]] == list(range(p.positions[row].item() + 1))
        assert seen[row][-1] == row
        for other in seen[row]:  # what is seen was itself written in this context
            assert set(seen[other]) <= set(seen[row])


@given(packs())
def test_branches_say_what_ends_say_and_cover_every_row_once(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    rows = [row for branch in p.branches for row in range(branch.begin, branch.end)]
    assert rows == list(range(p.num_tokens))
    for number, branch in enumerate(p.branches):
        assert (p.ends[branch.begin : branch.end] == branch.leave).all()
        above = [b for b in p.branches[:number] if b.end <= branch.begin < b.leave]
        assert branch.depth == len(above)
        assert all(branch.leave <= b.leave for b in above)  # a tree: no branch leaves later than what it is in


@given(packs())
def test_every_trained_token_knows_its_row_of_the_table(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    assert p.table_rows.tolist() == [s.first_row + sum(s.mask[:t]) for s, t in trained(groups)]
    assert {p.token_ids.dtype, p.positions.dtype, p.targets.dtype, p.logit_rows.dtype, p.ends.dtype} == {torch.int64}
    assert len(set(p.logit_rows.tolist())) == len(p.logit_rows)


@given(packs())
def test_row_is_padded_and_padding_is_never_seen_or_trained(case: tuple) -> None:
    groups, share, multiple = case
    p, unpadded = pack(groups, share=share, multiple=multiple), pack(groups, share=share)
    filled = unpadded.num_tokens
    assert filled <= p.num_tokens < filled + multiple
    assert p.num_tokens % multiple == 0
    assert p.ends[:filled].equal(unpadded.ends)
    assert (p.ends[:filled] <= filled).all()
    assert p.logit_rows.max().item() < filled


@given(packs())
def test_sharing_never_costs_a_token(case: tuple) -> None:
    groups, _, _ = case
    shared, apart = pack(groups), pack(groups, share=False)
    assert shared.num_tokens <= apart.num_tokens == apart.tokens_apart == shared.tokens_apart
    assert apart.tokens_apart == sum(len(inputs(s)) for group in groups for s in group if any(s.mask))


@given(packs())
def test_rows_are_the_same_tree_in_any_order_of_samples(case: tuple) -> None:
    groups, _, multiple = case
    one = pack(groups, multiple=multiple)
    other = pack([group[::-1] for group in groups[::-1]], multiple=multiple)
    for name in ("token_ids", "positions", "ends", "logit_rows"):
        assert getattr(one, name).equal(getattr(other, name))
    assert one.branches == other.branches


# --- by hand ------------------------------------------------------------------------------------------------


def test_siblings_share_their_prompt() -> None:
    p = pack([[sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [6, 7, 8])]])
    assert p.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert p.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert p.ends.tolist() == [6, 6, 6, 4, 6, 6]
    assert p.logit_rows.tolist() == [2, 3, 4, 5]
    assert p.row_of_target.tolist() == [0, 1, 0, 2, 3]
    assert p.tokens_apart == 9


def test_shared_turn_stands_once_and_each_trains_its_row() -> None:
    """Turn 4 5 with the tool's word 9: two siblings go on, one ended before, one went another way."""
    prompt = [1, 2, 3]
    mask = [True, True, False, True, True]
    groups = [
        [
            Sample(prompt, [4, 5, 9, 6, 6], mask, 0, 0),
            Sample(prompt, [4, 5], [True, True], 1, 4),
            Sample(prompt, [4, 5, 9, 7, 7], mask, 2, 6),
            Sample(prompt, [8], [True], 3, 10),
        ]
    ]
    p = pack(groups)
    assert p.token_ids.tolist() == [1, 2, 3, 4, 5, 9, 6, 7]
    assert p.ends.tolist() == [8, 8, 8, 8, 8, 8, 7, 8]
    assert p.logit_rows.tolist() == [2, 3, 5, 6, 7]  # after the tool's word, not before it: nobody chose it
    assert p.targets.tolist() == [4, 5, 6, 6, 4, 5, 4, 5, 7, 7, 8]
    assert p.logit_rows[p.row_of_target].tolist() == [2, 3, 5, 6, 2, 3, 2, 3, 5, 7, 2]
    assert p.table_rows.tolist() == list(range(11))


def test_common_beginning_of_all_groups_stands_once() -> None:
    head = list(range(30))
    p = pack([[sample([*head, 20], [1])], [sample([*head, 21, 22], [1])], [sample(head, [1])]])
    assert p.token_ids.tolist() == [*head, 20, 21, 22]
    assert p.positions.tolist()[30:] == [30, 30, 31]


def test_untrained_tails_and_samples_do_not_run() -> None:
    p = pack([[Sample([1, 2], [3, 4, 5, 6], [True, True, False, False], 0, 0), Sample([1, 2], [7], [False], 1, 2)]])
    assert p.token_ids.tolist() == [1, 2, 3]
    assert p.targets.tolist() == [3, 4]


def test_without_sharing_every_sample_has_its_own_prompt() -> None:
    p = pack([[sample([1, 2], [4, 5]), sample([1, 2], [6])]], share=False)
    assert p.token_ids.tolist() == [1, 2, 4, 1, 2]
    assert p.ends.tolist() == [3, 3, 3, 5, 5]


def test_pack_without_a_trained_token_is_one_token() -> None:
    p = pack([[Sample([1, 2], [3], [False], 0, 0)]])
    assert (p.num_tokens, len(p.logit_rows), len(p.targets), len(p.row_of_target)) == (1, 1, 0, 0)
    assert p.targets.dtype == p.row_of_target.dtype == p.table_rows.dtype == torch.int64


# --- the tree -----------------------------------------------------------------------------------------------


def test_stretches_of_the_docstring() -> None:
    found = tree_segments([5, 6, 3], [4, 2])
    assert [(s.start, s.stop, s.parent) for s in found] == [(0, 2, -1), (2, 4, 0), (4, 5, 1), (4, 6, 1), (2, 3, 0)]


@pytest.mark.parametrize(("common", "shared"), [(1, False), (20, True)])
def test_common_stretch_stands_once_where_that_saves(common: int, shared: bool) -> None:
    found = tree_segments([common + 100, common + 100], [common])
    assert len(found) == (3 if shared else 2)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_beginning_is_the_longest(one: list[int], other: list[int]) -> None:
    length = common_beginning(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
