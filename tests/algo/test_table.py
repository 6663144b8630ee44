"""One row for every token that the policy wrote, in the order of the batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.samples import build_samples
from asyncrl.algo.table import build_table
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.algo.tables import few, last_rows, make, reordered, rows_of, tables
from tests.fakes import completion


def answer(logprobs: list[float], versions: list[tuple[int, int, int]], finish: str = "stop") -> Completion:
    return Completion(list(range(len(logprobs))), logprobs, [VersionSpan(*span) for span in versions], finish)


EMPTY = Completion([], [], [], "stop")
PLAYED = Trajectory(
    [
        Turn([], answer([-0.1, -0.2], [(3, 0, 2)]), reward=0.25),
        Turn([50, 51], answer([-0.3, -0.4], [(3, 0, 1), (4, 1, 2)], "length"), reward=0.5, token_rewards=[1.0, 2.0]),
    ],
    reward=8.0,
)
SILENT = Trajectory([Turn([], EMPTY, reward=16.0)], reward=1.0)
CUT_EARLY = Trajectory([Turn([], answer([-0.5], [(5, 0, 1)], "length")), Turn([9], EMPTY)], reward=2.0)


def test_table_by_hand() -> None:
    groups = [Group("a", 0, [12], [PLAYED, SILENT], "made"), Group("b", 1, [13], [CUT_EARLY], "made")]
    table = build_table(groups, version=5)
    assert table.sample.tolist() == [0, 0, 0, 0, 2]
    assert table.turn.tolist() == [0, 0, 1, 1, 0]
    assert table.behaviour.tolist() == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert table.lag.tolist() == [2, 2, 2, 1, 0]
    assert table.group.tolist() == [0, 0, 1]
    assert table.truncated.tolist() == [True, False, False]
    assert table.token_reward.tolist() == [0.0, 0.25, 1.0, 2.5, 0.0]
    assert table.reward.tolist() == [8.0, 17.0, 2.0]  # no token can hold the 16 of a turn that wrote nothing
    assert (table.num_tokens, table.num_samples, table.num_groups) == (5, 3, 2)
    assert {table.behaviour.dtype, table.reward.dtype, table.token_reward.dtype} == {torch.float64}


def test_no_groups_give_an_empty_table() -> None:
    table = build_table([], version=0)
    assert (table.num_tokens, table.num_samples, table.num_groups) == (0, 0, 0)
    assert last_rows(table).tolist() == table.lengths().tolist() == []


def test_sums_and_last_rows_by_hand() -> None:
    table = make([2, 0, 3], [0.0, 0.0, 0.0])
    assert table.lengths().tolist() == [2, 0, 3]
    assert last_rows(table).tolist() == [1, 4]
    assert table.sum_per_sample(torch.arange(5.0)).tolist() == [1.0, 0.0, 9.0]
    assert table.per_token(torch.tensor([5, 6, 7])).tolist() == [5, 5, 7, 7, 7]


def test_rows_keep_sample_numbers_and_take_the_models_type() -> None:
    table = make([2, 1, 3], [1.0, 2.0, 3.0], keep=[True, True, False, True, False, True], lag=range(6))
    rows = table.rows(rows_of(table, [2, 0]), torch.float32)
    assert rows.sample.tolist() == [2, 2, 2, 0, 0]
    assert rows.lag.tolist() == [3, 4, 5, 0, 1]
    assert rows.keep.tolist() == [True, False, True, True, True]
    assert (rows.behaviour.dtype, rows.reward.dtype, rows.lag.dtype) == (torch.float32, torch.float32, torch.int64)
    assert rows.lengths().tolist() == [2, 0, 3]  # of what is here
    assert rows.reward.tolist() == [1.0, 2.0, 3.0]  # columns of samples stay whole
    assert rows.reference is None


@few
@given(tables(), st.data())
def test_sums_over_parts_of_whole_samples_are_those_of_the_table(table, data: st.DataObject) -> None:
    first = data.draw(st.sets(st.integers(0, table.num_samples - 1)))
    parts = [sorted(first), sorted(set(range(table.num_samples)) - first)]
    sums = sum(
        (rows := table.rows(rows_of(table, part), torch.float64)).sum_per_sample(rows.behaviour) for part in parts
    )
    torch.testing.assert_close(sums, table.sum_per_sample(table.behaviour), rtol=0, atol=0)


@few
@given(tables(), st.randoms())
def test_table_in_another_order_is_one_of_the_same_samples(table, shuffler) -> None:
    order = shuffler.sample(range(table.num_samples), table.num_samples)
    moved, where = reordered(table, order)
    assert moved.behaviour.tolist() == table.behaviour[where].tolist()
    assert moved.sample.tolist() == sorted(moved.sample.tolist())
    assert moved.lengths().tolist() == [table.lengths().tolist()[i] for i in order]


@few
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3))
def test_rows_and_samples_count_the_same_tokens(sizes: list[list[int]]) -> None:
    groups = [
        Group(f"g{i}", i, [12], [Trajectory([Turn([], completion(tokens=n) if n else EMPTY)]) for n in one], "made")
        for i, one in enumerate(sizes)
    ]
    table = build_table(groups, version=0)
    for sample in (sample for one in build_samples(groups) for sample in one):
        rows = (table.sample == sample.number).nonzero()[:, 0].tolist()
        assert rows == list(range(sample.first_row, sample.first_row + sample.num_trained))


def said(*logprobs: float, **turn) -> Turn:
    return Turn(turn.pop("observation", []), answer(list(logprobs), [(0, 0, len(logprobs))]), **turn)


ROLES = Trajectory(
    [
        said(-0.1, role="white", reward=1.0),
        said(-0.2, role="black", reward=-1.0, observation=[12, 9], begins=True),
        said(-0.3, role="white", observation=[12, 8], begins=True),
        said(-0.4, role="black", observation=[7]),
    ],
    reward=0.5,
)


def test_each_role_has_episodes_samples_and_siblings_of_its_own() -> None:
    other = Trajectory([said(-0.5, role="black"), said(-0.6, role="white", begins=True, observation=[12])], 0.0)
    groups = [Group("a", 0, [12], [ROLES, other], "made"), Group("b", 1, [13], [other], "made")]
    table, samples = build_table(groups, version=0), [one for of in build_samples(groups) for one in of]
    assert table.behaviour.tolist() == [-0.1, -0.3, -0.2, -0.4, -0.5, -0.6, -0.5, -0.6]
    assert table.turn.tolist() == [0, 2, 1, 3, 0, 1, 0, 1]
    assert table.sample.tolist() == [0, 1, 2, 2, 3, 4, 5, 6]
    assert table.episode.tolist() == [0, 0, 1, 2, 3, 4, 5]  # white's two samples are one episode
    assert table.group.tolist() == [0, 1, 1, 0, 2, 3]  # white a, black a; then black a, white a; black b, white b
    assert table.reward.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert table.sum_per_episode(table.token_reward).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert last_rows(table).tolist() == [1, 3, 4, 5, 6, 7]
    assert [(one.prompt_ids, one.token_ids, one.mask) for one in samples[:3]] == [
        ([12], [0], [True]),
        ([12, 8], [0], [True]),
        ([12, 9], [0, 7, 0], [True, False, True]),
    ]
    assert [one.first_row for one in samples] == [0, 1, 2, 4, 5, 6, 7]
