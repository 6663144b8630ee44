"""Turns beside turns: by hand, and with forks."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import ADVANTAGES, EPSILON, whiten
from asyncrl.algo.table import LossRows
from asyncrl.errors import ConfigError
from asyncrl.extensions.turns.advantage import depths
from asyncrl.launch.help import algorithms
from asyncrl.schema import Completion, Trajectory, Turn, VersionSpan
from tests.algo.tables import (
    PLAIN,
    TREE,
    P,
    advantage,
    constant_changes_nothing,
    even,
    few,
    forests,
    found,
    make,
    numbers,
    said,
    table_of,
    tables,
)
from tests.fakes import tiny_config

# -- by hand -------------------------------------------------------------------------------------------------------


def test_returns_compare_episodes_from_the_same_turn_on() -> None:
    # returns 8 2 12 8, shares 1 1/2 1/2 1/2; the other came to its first turn only
    assert found("turn_discounted", TREE, PLAIN) == [3.0, -1.5, 3.5, 1.5, -3.0]
    # at 1/2: 1 + (2 + 8) / 4, 2, 4 + 4, 8, and 5
    assert found("turn_discounted", TREE, PLAIN, discount=0.5) == [-1.5, -1.5, 1.5, 1.5, 1.5]
    # three episodes of 3, 1 and 2 turns: the last turn of the first has nobody beside it but whole episodes
    long = Trajectory([said(4, reward=1.0), said(5, observation=[0], reward=2.0), said(6, observation=[0], reward=3.0)])
    short, middle = Trajectory([said(4)]), Trajectory([said(4), said(5, observation=[0], reward=1.0)])
    assert found("turn_discounted", long, short, middle) == [6 - 0.5, 5 - 1.0, 3 - 0.5, 0 - 3.5, 1 - 3.0, 1 - 5.0]


def test_ways_of_a_fork_are_compared_with_each_other() -> None:
    # first turns: 8 beside 5. Behind the fork 2 beside 12, and 5 counts as one more. The last one: 5, and 3.5 - 5
    assert found("turn_loo", TREE, PLAIN) == [3.0, (2 - 8.5) / 2, (12 - 3.5) / 2, (8 - 3.5) / 2, -3.0]


def test_lone_forking_episode_is_compared_behind_the_fork() -> None:
    assert found("turn_loo", TREE) == [0.0, (2 - 12) / 2, (12 - 2) / 2, (8 - 2) / 2]
    assert found("turn_discounted", TREE) == [0.0] * 4


def test_contexts_that_meet_by_chance_are_siblings() -> None:
    one = Trajectory([said(4), said(5, observation=[0], reward=1.0)])
    other = Trajectory([said(4), said(6, observation=[0], reward=3.0)])
    apart = Trajectory([said(8), said(6, observation=[0], reward=8.0)])
    # second turns: 1 beside 3, with (3 + 8) / 2 as one more; apart has (1 + 3) / 2 alone
    assert found("turn_loo", one, other, apart)[1::2] == [1 - (3 + 5.5) / 2, 3 - (1 + 4.5) / 2, 8 - 2.0]


def test_episodes_meeting_at_the_prompt_go_turn_by_turn() -> None:
    rng = random.Random(0)
    episodes = [
        Trajectory([said(10 * n + k, observation=[0] * (k > 0), reward=rng.random()) for k in range(1 + n % 3)])
        for n in range(1, 6)
    ]
    assert found("turn_loo", *episodes) == pytest.approx(found("turn_discounted", *episodes), abs=1e-14)


def test_generalised_advantages_look_at_all_ways() -> None:
    gae_raw = pytest.importorskip("asyncrl.extensions.critic.value").gae_raw
    table = replace(table_of(TREE, PLAIN), values=numbers([1, 2, 3, 4, 5]))
    # errors 1 + (2 + 3) / 2 - 1, 2 - 2, 4 + 4 - 3, 8 - 4, 5 - 5
    expected = [2.5 + (0.0 + 7.0) / 4, 0.0, 5 + 2.0, 4.0, 0.0]
    assert gae_raw(table, discount=1.0, gae_lambda=0.5).tolist() == expected
    shares = numbers([1, 0.5, 0.5, 0.5, 1])
    assert advantage("gae", gae_lambda=0.5)(table).tolist() == whiten(shares * numbers(expected)).tolist()


def test_rewards_to_go_and_process_rewards_go_along_the_ways() -> None:
    shares = numbers([1, 0.5, 0.5, 0.5, 1])
    to_go = whiten(shares * numbers([8, 2, 12, 8, 5]))
    assert found("reinforce_pp", TREE, PLAIN) == pytest.approx(to_go.tolist(), abs=1e-12)
    # rewards 1 2 4 8 5: mean 4, variance 30 / 4
    one = 1 / (7.5**0.5 + EPSILON)
    expected = [-3 + (-2 + 4) / 2, -2 / 2, 4 / 2, 4 / 2, 1]
    assert found("grpo_turn", TREE, PLAIN) == pytest.approx([one * n for n in expected], abs=1e-12)


def test_turns_are_normalised_over_the_group_and_added_up() -> None:
    # Sample 0 has turns of 2 and 1 tokens, sample 1 one turn. Rewards of turns: 3, 1 (the episode's), 2; mean 2, std 1.
    table = make([3, 1], [1.0, 2.0], turn=[0, 0, 1, 0], token_reward=[0.0, 3.0, 0.0, 0.0])
    one = 1 / (1 + EPSILON)
    assert advantage("grpo_turn")(table).tolist() == pytest.approx([one - one, one - one, -one, 0.0], abs=1e-12)
    assert advantage("grpo_turn", discount=0.5)(table).tolist() == pytest.approx(
        [one / 2, one / 2, -one, 0.0], abs=1e-12
    )


@few
@given(tables())
def test_turns_of_one_are_episodes(table: LossRows) -> None:
    full = make([1] * table.num_samples, table.reward.tolist(), table.group.tolist())
    assert advantage("grpo_turn")(full).tolist() == pytest.approx(advantage("grpo")(full).tolist(), abs=1e-12)


def test_depth_of_a_turn_counts_those_before_it_on_its_way() -> None:
    assert depths(table_of(TREE, PLAIN).turns).tolist() == [0, 1, 1, 2, 0]


WHOLE = ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "pass_at_k", "grpo_passk"]


@pytest.mark.parametrize("name", [name for name in WHOLE if name in ADVANTAGES])
def test_forking_episodes_get_the_mean_over_their_ways(name: str) -> None:
    as_one = [Trajectory([said(*[1] * 4, reward=8.0)]), PLAIN]
    params = {"correct_above": 6.0}
    assert found(name, TREE, PLAIN, **params) == pytest.approx(found(name, *as_one, **params), abs=1e-12)


@pytest.mark.parametrize("name", ["turn_discounted", "turn_loo", "grpo_turn", "rloo", "reinforce_pp"])
def test_rewards_of_tokens_count_for_their_turn(name: str) -> None:
    def episodes(*, apart: bool) -> list[Trajectory]:
        def turn(a: float, b: float, **more: Any) -> Turn:
            return said(4, 5, reward=b, token_rewards=[a, 0.0], **more) if apart else said(4, 5, reward=a + b, **more)

        return [
            Trajectory([turn(0.0, 1.0), turn(0.0, 2.0, observation=[0])]),
            Trajectory([turn(0.0, 0.5), turn(3.0, 1.0, observation=[0])]),
        ]

    one, other = found(name, *episodes(apart=True)), found(name, *episodes(apart=False))
    if name == "reinforce_pp":  # also within it: the token behind the reward gets none of it
        assert one[-1] < other[-1]
        assert len(set(one)) > 4
    else:
        assert one == pytest.approx(other, abs=1e-12)


# -- for every group -----------------------------------------------------------------------------------------------

NAMES = ["turn_discounted", "turn_loo"]


@pytest.mark.parametrize("name", ["rloo", *NAMES])
@few
@given(trees=forests(), shuffler=st.randoms())
def test_order_of_episodes_and_of_their_ways_does_not_matter(name: str, trees: list[Trajectory], shuffler) -> None:
    def shuffled(tree: Trajectory) -> Trajectory:
        starts = [place for place, turn in enumerate(tree.turns) if turn.fork is not None]
        trunk, *ways = [tree.turns[a:b] for a, b in zip([0, *starts], [*starts, len(tree.turns)], strict=True)]
        shuffler.shuffle(ways)
        return Trajectory([*trunk, *(turn for way in ways for turn in way)], tree.reward)

    other = shuffler.sample([shuffled(tree) for tree in trees], len(trees))
    params = {"discount": 0.9}
    advantages = [
        dict(zip([id(t) for tree in of for t in tree.turns for _ in t.completion.token_ids], a, strict=True))
        for of, a in ((trees, found(name, *trees, **params)), (other, found(name, *other, **params)))
    ]
    assert advantages[1] == pytest.approx(advantages[0], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@few
@given(trees=forests(), shift=st.integers(-4, 4))
def test_constant_reward_of_all_episodes_changes_nothing(name: str, trees: list[Trajectory], shift: int) -> None:
    constant_changes_nothing(name, trees, shift)


@pytest.mark.parametrize("name", NAMES)
@few
@given(trees=forests(), reward=st.sampled_from([0.1, 0.3, -0.7]))
def test_equal_ways_have_exactly_no_advantage(name: str, trees, reward: float) -> None:
    assert not any(found(name, *even(trees, reward)))


def test_batch_without_a_sample_has_no_advantages() -> None:
    for name in NAMES:
        assert advantage(name)(make([], [])).tolist() == []


def test_turns_of_several_tokens_and_roles_each_among_their_own() -> None:
    def game(white: float, black: float) -> Trajectory:
        written = Completion([4, 5], [-0.5] * 2, [VersionSpan(0, 0, 2)], "stop")
        return Trajectory(
            [
                Turn([], written, white, role="white"),
                Turn([*P, 4, 5], written, black, begins=True, role="black"),
            ],
            1.0,
        )

    for name in ("turn_discounted", "turn_loo"):
        assert found(name, game(1.0, 5.0), game(3.0, -5.0)) == [-2.0, -2.0, 10.0, 10.0, 2.0, 2.0, -10.0, -10.0]


# -- as an extension -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "alone"), [("turn_loo", True), ("turn_discounted", False)])
def test_only_the_fork_estimator_works_without_siblings(name: str, alone: bool) -> None:
    with nullcontext() if alone else pytest.raises(ConfigError, match=r"compares siblings.*turn_loo"):
        tiny_config(**{"rollout.group_size": 1, "algo.advantage": name})


def test_settings_are_those_of_the_function_and_help_knows_them() -> None:
    config = tiny_config(**{"algo.advantage": {"name": "turn_discounted", "discount": 0.5}})
    assert config.algo.advantage.settings == {"discount": 0.5}
    assert algorithms("algo.advantage")["turn_loo"] == {"discount": "1.0"}
    with pytest.raises(ConfigError, match="turn_loo has the settings discount"):
        tiny_config(**{"algo.advantage": {"name": "turn_loo", "gamma": 1.0}})
