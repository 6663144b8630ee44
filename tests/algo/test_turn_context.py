"""The turn context gives for each turn the turn before it, its share and its context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.table import build_table
from asyncrl.algo.turns import turn_contexts
from asyncrl.schema import Group, Trajectory
from tests.algo.tables import P, cut, said, table_of

# P | 4 o 5 o 6, and from behind 4: | 7 o 8
TREE = Trajectory(
    [
        said(4, reward=1.0),
        said(5, observation=[0], reward=2.0),
        said(6, observation=[0], reward=4.0),
        said(7, observation=[*P, 4, 0], begins=True, fork=0, reward=8.0),
        said(8, observation=[0], finish="length", reward=16.0),
    ],
    reward=32.0,
)


def test_ways_of_a_fork_come_after_one_turn_in_one_context() -> None:
    found = turn_contexts(TREE, P)
    assert [one.parent for one in found] == [-1, 0, 1, 0, 3]
    assert [one.share for one in found] == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert found[1].context == found[3].context
    assert len({one.context for one in found}) == 4


def test_table_holds_them_for_every_token() -> None:
    other = Trajectory([said(4, 4), said(5, observation=[0])], 0.0)
    table = table_of(TREE, other)
    assert table.parent.tolist() == [-1, 0, 1, 0, 3, -1, -1, 0]
    assert table.share.tolist() == [1.0] + [0.5] * 4 + [1.0] * 3
    context = table.context.tolist()
    assert context[0] == context[5] == context[6]  # the prompt
    assert context[1] == context[3] != context[7]  # 4 4 o is not 4 o
    assert table.state.tolist() == context  # no state was named
    assert table.truncated.tolist() == [True, False]  # one of its ways


def test_what_follows_a_turn_is_the_mean_over_its_ways() -> None:
    table = table_of(TREE)
    turns = table.turns
    assert turns.ends.tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert turns.turn_rewards().tolist() == [1.0, 2.0, 36.0, 8.0, 48.0]
    assert turns.token_rewards().tolist() == [1.0, 2.0, 36.0, 8.0, 48.0]
    assert turns.to_go(turns.turn_rewards(), 1.0).tolist() == [1 + (38 + 56) / 2, 38.0, 36.0, 56.0, 48.0]
    assert turns.to_go(turns.turn_rewards(), 0.5).tolist() == [1 + (20 + 32) / 4, 20.0, 36.0, 32.0, 48.0]
    assert TREE.total == 1 + (38 + 56) / 2


def test_contexts_are_those_of_their_group_and_role() -> None:
    one, other = Trajectory([said(4)], 0.0), Trajectory([said(4, role="black")], 0.0)
    groups = [Group("a", 0, P, [one, other], "t"), Group("b", 1, P, [one], "t")]
    table = build_table(groups, 0)
    assert len(set(table.context.tolist())) == len(set(table.state.tolist())) == 3


def test_turns_that_wrote_nothing_are_passed_over() -> None:
    table = table_of(Trajectory([said(4), said(observation=[0], reward=3.0), said(5, observation=[0])], 1.0))
    assert table.turn.tolist() == [0, 2]
    assert table.parent.tolist() == [-1, 0]
    assert table.reward.tolist() == [4.0]
    way = said(observation=[*P, 4, 0], begins=True, fork=0, reward=3.0)
    assert table_of(Trajectory([said(4), said(5, observation=[0]), way], 1.0)).reward.tolist() == [2.5]


def test_each_role_follows_itself_on_the_way_that_leads_to_it() -> None:
    """White, black, white; and from behind black's turn white once more, then black."""
    turns = [
        said(1, role="w"),
        said(2, role="b", observation=P, begins=True),
        said(3, role="w", observation=[0]),
        said(4, role="w", observation=[*P, 1, 0], begins=True, fork=1),
        said(5, role="b", observation=[*P, 2, 0], begins=True, reward=8.0),
    ]
    found = turn_contexts(Trajectory(turns), P)
    assert [one.parent for one in found] == [-1, -1, 0, 0, 1]
    assert [one.share for one in found] == [1.0, 1.0, 0.5, 0.5, 0.5]
    table = table_of(Trajectory(turns, 4.0))  # white's rows, then black's
    of = table.turns
    assert table.token_reward.tolist() == [0.0, 0.0, 0.0, 0.0, 8.0]
    assert of.ends.tolist() == [0.0, 1.0, 1.0, 0.5, 1.0]  # black ends with its first turn on one way of two
    assert of.to_go(of.turn_rewards(), 1.0).tolist() == [4.0, 4.0, 4.0, 2.0 + 12 / 2, 12.0]


def test_repeated_context_on_one_way_is_another() -> None:
    again = [said(4), *(said(n, observation=[9], begins=True) for n in (5, 6, 7))]
    found = turn_contexts(Trajectory(again), P)
    assert [one.context[1] for one in found] == [0, 0, 1, 2]
    assert len({one.state for one in found}) == 2
    forks = [said(4), said(5, observation=[9], begins=True), said(6, observation=[9], begins=True, fork=0)]
    found = turn_contexts(Trajectory(forks), P)
    assert found[1].context == found[2].context


def test_states_are_the_environments_where_it_names_them() -> None:
    turns = [said(4, state="s"), said(5, observation=[0], state="t"), said(6, observation=[0], state="s")]
    state = table_of(Trajectory(turns)).state.tolist()
    assert state[0] == state[2] != state[1]


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=5), st.data())
def test_cutting_an_episode_into_samples_changes_no_context(answers: list[list[int]], data: st.DataObject) -> None:
    turns = [said(*ids, observation=[0] * data.draw(st.integers(n > 0, 2))) for n, ids in enumerate(answers)]
    whole = Trajectory(turns)
    pieces = cut(whole, P, data.draw(st.sets(st.integers(1, max(1, len(turns) - 1)))))
    assert turn_contexts(pieces, P) == turn_contexts(whole, P)


def test_rows_and_devices_carry_them() -> None:
    table = table_of(TREE)
    rows = table.rows(torch.tensor([3, 4]), torch.float32).to(torch.device("cpu"))
    assert (rows.parent.tolist(), rows.share.tolist()) == ([0, 3], [0.5, 0.5])
    assert (rows.context.tolist(), rows.state.tolist()) == ([table.context[i] for i in (3, 4)],) * 2
    assert rows.share.dtype == torch.float32


@pytest.mark.parametrize("ways", [3, 7, 49])
def test_an_episode_of_many_ways_ends_at_their_ends_alone(ways: int) -> None:
    """Parts of a whole do not add up to it exactly."""
    branches = [said(5, observation=[*P, 4], begins=True, fork=0) for _ in range(ways - 1)]
    turns = table_of(Trajectory([said(4), said(5), *branches], 1.0)).turns
    assert turns.ends.tolist() == [0.0, *[1.0] * ways]
