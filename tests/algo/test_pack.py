"""A pack is worth exactly what its sequences are worth one by one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.pack import MIN_ROOT, Pack, micro_batches, pack, packed_size, spread
from asyncrl.algo.samples import Sample

VOCAB, HEADS, WIDTH, LONGEST = 23, 2, 4, 64
Groups = list[list[Sample]]


@st.composite
def packs(draw: st.DrawFn) -> tuple[Groups, bool, int]:
    """Groups with or without a common beginning, masked observations, one-token and empty answers."""
    rng = draw(st.randoms(use_true_random=False))
    common = [rng.randrange(VOCAB) for _ in range(draw(st.sampled_from([0, 3, MIN_ROOT - 1, MIN_ROOT, 12])))]
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = common + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        groups.append([_sample(prompt, rng) for _ in range(rng.randint(1, 4))])
    if not trained(groups):
        groups[0].append(sample(groups[0][0].prompt_ids, [1, 2]))
    return groups, draw(st.booleans()), draw(st.sampled_from([1, 2, 4, 7]))


def _sample(prompt: list[int], rng: random.Random) -> Sample:
    length = rng.choice([0, 1, 1, 2, 5, 8])
    mask = [rng.random() < 0.8 for _ in range(length)]
    return Sample(prompt, [rng.randrange(VOCAB) for _ in range(length)], mask, 0, 0)


def numbered(groups: Groups) -> Groups:
    """The same samples at their rows of a table, with some rows between that are of others."""
    row, found = 3, []
    for group in groups:
        found.append([])
        for one in group:
            found[-1].append(replace(one, first_row=row))
            row += one.num_trained + 2
    return found


def seen_rows(p: Pack) -> list[set[int]]:
    """Rows that each row attends to, from the tensors that the attention uses."""
    seen = [set(range(row + 1)) for row in range(p.root)]
    _, longest = p.units.shape
    for place in p.places.tolist():
        unit, query = divmod(place, longest)
        keys = p.visible[unit, 0, query].nonzero().flatten().tolist()
        own = p.units[unit].tolist()
        seen.append({key if key < p.root else own[key - p.root] for key in keys})
    return seen


def predictors(p: Pack) -> list[int]:
    """Row of the hidden state that each target is predicted from."""
    return p.logit_rows[p.row_of_target].tolist()


def trained(groups: Groups) -> list[tuple[Sample, int]]:
    return [(s, t) for group in groups for s in group for t, chosen in enumerate(s.mask) if chosen]


@given(packs())
@settings(max_examples=200)
def test_every_trained_token_is_predicted_from_its_own_sequence_and_nothing_else(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    seen = seen_rows(p)
    expected = trained(groups)
    assert p.targets.tolist() == [s.token_ids[t] for s, t in expected]
    for (sample, t), row in zip(expected, predictors(p), strict=True):
        context = sorted((p.positions[r].item(), p.token_ids[r].item()) for r in seen[row])
        sequence = [*sample.prompt_ids, *sample.token_ids[:t]]
        assert context == list(enumerate(sequence))  # every position once, each with its token
        assert p.positions[row].item() == len(sequence) - 1


@given(packs())
@settings(max_examples=200)
def test_every_row_sees_a_whole_beginning_that_ends_in_itself(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    rows = sum(len(unit) for unit in _branches(groups, share)) + p.root
    seen = seen_rows(p)
    for row in range(rows):
        assert sorted(p.positions[r].item() for r in seen[row]) == list(range(p.positions[row].item() + 1))
        assert row in seen[row]
        for other in seen[row]:  # what is seen was itself written in this context
            assert seen[other] <= seen[row]


def _branches(groups: Groups, share: bool) -> list[list[int]]:
    """Tokens of each unit, the root taken off."""
    root = pack(groups, share=share).root
    units = groups if share else [[sample] for group in groups for sample in group]
    return [unit[0].prompt_ids[root:] + [t for s in unit for t in s.token_ids[:-1]] for unit in units]


@given(packs())
def test_every_trained_token_knows_its_row_of_the_table(case: tuple) -> None:
    groups, share, multiple = case
    groups = numbered(groups)
    p = pack(groups, share=share, multiple=multiple)
    assert p.table_rows.tolist() == [s.first_row + sum(s.mask[:t]) for s, t in trained(groups)]
    assert {p.token_ids.dtype, p.positions.dtype, p.targets.dtype, p.logit_rows.dtype} == {torch.int64}


@given(packs())
def test_row_is_padded_to_the_multiple_and_padding_is_never_seen_or_trained(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    filled = p.root + sum(len(branch) for branch in _branches(groups, share))
    assert filled <= p.num_tokens < filled + multiple
    assert p.num_tokens % multiple == 0
    assert len(p.places) == p.num_tokens - p.root
    assert p.visible.any(-1).all()  # a query that sees nothing would be NaN
    assert all(max(rows) < filled for rows in seen_rows(p))
    assert p.logit_rows.max().item() < filled


@given(packs())
def test_pack_size_is_bounded_by_the_sum_of_its_groups(case: tuple) -> None:
    groups, share, _ = case
    p = pack(groups, share=share)
    assert p.num_tokens <= sum(packed_size(group, share) for group in groups)
    if not share or len(groups) == 1:
        assert p.num_tokens == sum(packed_size(group, share) for group in groups)


# --- the same numbers as one by one, in float64 -------------------------------------------------------------

_generator = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (
    torch.randn(VOCAB, LONGEST, HEADS, WIDTH, dtype=torch.float64, generator=_generator) for _ in range(3)
)  # one vector for each token at each position


def separate(tokens: list[int]) -> Tensor:
    """Causal attention over one sequence: [T, heads, width]."""
    at = (torch.tensor(tokens), torch.arange(len(tokens)))
    q, k, v = (table[at].transpose(0, 1) for table in (QUERY, KEY, VALUE))
    scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def together(p: Pack) -> Tensor:
    """Attention over the pack, as its tensors prescribe: [N, heads, width]."""
    q, k, v = (table[p.token_ids, p.positions] for table in (QUERY, KEY, VALUE))
    parts = [separate(p.token_ids[: p.root].tolist())] if p.root else []

    def batched(x: Tensor) -> Tensor:
        return x[p.units].transpose(1, 2)

    def rooted(x: Tensor) -> Tensor:
        root = x[: p.root].transpose(0, 1).expand(len(p.units), -1, -1, -1)
        return torch.cat([root, batched(x)], 2)

    out = F.scaled_dot_product_attention(batched(q), rooted(k), rooted(v), attn_mask=p.visible)
    parts.append(out.transpose(1, 2).flatten(0, 1)[p.places])
    return torch.cat(parts)


@given(packs())
@settings(max_examples=150)
def test_attention_over_the_pack_equals_attention_over_each_sequence(case: tuple) -> None:
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    out = together(p)
    assert out.shape[0] == p.num_tokens
    assert out.isfinite().all()
    for (sample, t), row in zip(trained(groups), predictors(p), strict=True):
        alone = separate([*sample.prompt_ids, *sample.token_ids])[len(sample.prompt_ids) + t - 1]
        torch.testing.assert_close(out[row], alone, rtol=1e-10, atol=1e-10)


# --- by hand ------------------------------------------------------------------------------------------------


def sample(prompt: list[int], tokens: list[int]) -> Sample:
    return Sample(prompt, tokens, [True] * len(tokens), 0, 0)


def test_siblings_share_their_prompt() -> None:
    p = pack([[sample([1, 2, 3], [4, 5]), sample([1, 2, 3], [6, 7, 8])]])
    assert p.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert p.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert p.logit_rows.tolist() == [2, 3, 4, 5]
    assert p.row_of_target.tolist() == [0, 1, 0, 2, 3]
    assert p.root == 0


def test_common_beginning_stands_once_and_leaves_each_prompt_a_token() -> None:
    head = list(range(MIN_ROOT + 2))
    p = pack([[sample([*head, 20], [1])], [sample([*head, 21, 22], [1])], [sample(head, [1])]])
    assert p.root == MIN_ROOT + 1  # the third prompt keeps its last token
    assert p.token_ids.tolist() == [*head[:-1], head[-1], 20, head[-1], 21, 22, head[-1]]
    assert p.positions.tolist()[p.root :] == [9, 10, 9, 10, 11, 9]


@pytest.mark.parametrize(("common", "root"), [(MIN_ROOT - 1, 0), (MIN_ROOT, MIN_ROOT)])
def test_short_common_beginning_is_not_shared(common: int, root: int) -> None:
    head = list(range(common))
    assert pack([[sample([*head, 20], [1])], [sample([*head, 21], [1])]]).root == root


def test_without_sharing_every_sample_has_its_own_prompt() -> None:
    p = pack([[sample([1, 2], [4, 5]), sample([1, 2], [6])]], share=False)
    assert p.token_ids.tolist() == [1, 2, 4, 1, 2]
    assert p.root == 0


def test_pack_without_a_trained_token_keeps_its_types() -> None:
    p = pack([[Sample([1, 2], [3], [False], 0, 0)]])
    assert (len(p.targets), len(p.row_of_target)) == (0, 0)
    assert p.targets.dtype == p.row_of_target.dtype == torch.int64


# --- splitting ----------------------------------------------------------------------------------------------

group_lists = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=0, max_size=12
).map(lambda sizes: [[sample([i] * prompt, [i] * n) for n in answers] for i, (prompt, answers) in enumerate(sizes)])


@given(group_lists, st.integers(1, 60), st.booleans())
def test_micro_batches_hold_every_group_whole_in_order_within_the_limit(groups, limit, share) -> None:
    found = micro_batches(groups, limit, share)
    assert [id(group) for batch in found for group in batch] == [id(group) for group in groups]
    sizes = [[packed_size(group, share) for group in batch] for batch in found]
    assert all(len(batch) == 1 or sum(batch) <= limit for batch in sizes)
    assert all(sum(first) + second[0] > limit for first, second in pairwise(sizes))  # no batch is cut short


@given(group_lists, st.integers(1, 5), st.booleans())
def test_spread_gives_every_group_whole_to_one_rank_and_balances(groups, ranks, share) -> None:
    found = spread(groups, ranks, share)
    assert len(found) == ranks
    assert sorted(id(group) for rank in found for group in rank) == sorted(id(group) for group in groups)
    loads = [sum(packed_size(group, share) for group in rank) for rank in found]
    largest = max((packed_size(group, share) for group in groups), default=0)
    assert max(loads) - min(loads) <= largest
