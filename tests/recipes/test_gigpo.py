"""GiGPO: by hand, as its authors' code has it, and what must hold for every group."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import ADVANTAGES, EPSILON
from asyncrl.algo.table import build_table
from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.schema import Group, Trajectory
from asyncrl.settings import Choice
from tests.algo.decisions import groups, world
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
)
from tests.fakes import compose_values

GIGPO, DR_GIGPO = "asyncrl_recipes.gigpo.advantage:gigpo", "asyncrl_recipes.gigpo.advantage:dr_gigpo"
NAMES = [GIGPO, DR_GIGPO]


def test_experiment_finds_the_estimator_with_its_settings() -> None:
    choice = load(compose_values("experiment=gigpo")).algo.advantage
    assert ADVANTAGES.find(choice).settings == {"discount": 0.95, "step_weight": 1.0}


def test_wrong_settings_are_refused() -> None:
    for settings in ({"step_weight": -1.0}, {"discount": 2.0}, {"weight": 1.0}):
        with pytest.raises(ConfigError, match=r"algo\.advantage"):
            ADVANTAGES.find(Choice(name=GIGPO, **settings))


def test_single_turns_of_one_prompt_count_twice() -> None:
    """Each turn is in one state with all of its siblings."""
    table = make([1, 4, 1, 3], [1.0, 0.0, 4.0, 1.0], [0, 0, 1, 1])
    one, other = math.sqrt(1 / 2) + EPSILON, math.sqrt(9 / 2) + EPSILON
    expected = [0.5, *[-0.5] * 4, 1.5, *[-1.5] * 3]
    assert advantage(DR_GIGPO)(table).tolist() == pytest.approx([2 * n for n in expected])
    scaled = [2 * n / (one if place < 5 else other) for place, n in enumerate(expected)]
    assert advantage(GIGPO)(table).tolist() == pytest.approx(scaled)


def reference(rows: list[dict[str, Any]], *, weight: float, gamma: float, scale: bool) -> list[float]:
    """Equations 3 to 8 of the paper, as verl-agent computes them: one row for each step, its return by a loop from the
    end, groups in dictionaries; the episodes' mean is over episodes (compute_mean_std_cross_steps=False)."""

    def normal(values: dict[Any, float], group: dict[Any, Any]) -> dict[Any, float]:
        of = defaultdict(list)
        for key, value in values.items():
            of[group[key]].append(value)
        statistics = {}
        for name, members in of.items():
            mean = sum(members) / len(members)
            variance = sum((m - mean) ** 2 for m in members) / max(1, len(members) - 1)
            statistics[name] = mean, variance**0.5 + 1e-6 if scale and len(members) > 1 else 1.0
        return {key: (v - statistics[group[key]][0]) / statistics[group[key]][1] for key, v in values.items()}

    total: dict[Any, float] = defaultdict(float)
    uid, returns, anchor = {}, {}, {}
    for row in rows:
        total[row["traj"]] += row["reward"]
        uid[row["traj"]] = row["uid"]
    running: dict[Any, float] = defaultdict(float)
    for number in reversed(range(len(rows))):
        row = rows[number]
        running[row["traj"]] = row["reward"] + gamma * running[row["traj"]]
        returns[number], anchor[number] = running[row["traj"]], (row["uid"], row["state"])
    episode, step = normal(total, uid), normal(returns, anchor)
    return [episode[row["traj"]] + weight * step[number] for number, row in enumerate(rows)]


steps = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4)), min_size=1, max_size=4)


@few
@given(
    st.lists(st.lists(steps, min_size=2, max_size=4), min_size=1, max_size=3),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.9, 1.0]),
    st.booleans(),
)
def test_gigpo_is_that_of_its_authors(sizes: list[Any], weight: float, gamma: float, scale: bool) -> None:
    rows, groups = [], []
    for number, episodes in enumerate(sizes):
        trajectories = []
        for n, episode in enumerate(episodes):
            rows += [
                {"uid": number, "traj": (number, n), "state": state, "reward": float(reward)}
                for state, reward in episode
            ]
            turns = [
                said(4, reward=float(reward), state=state, observation=[0] * (k > 0))
                for k, (state, reward) in enumerate(episode)
            ]
            trajectories.append(Trajectory(turns, 0.0))
        groups.append(Group(f"g{number}", number, P, trajectories, "t"))
    estimator = advantage(GIGPO if scale else DR_GIGPO, discount=gamma, step_weight=weight)
    ours = estimator(build_table(groups, 0))
    theirs = numbers(reference(rows, weight=weight, gamma=gamma, scale=scale))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_turns_of_a_way_count_with_their_share_of_the_episode() -> None:
    # episodes 8 and 5; first turns 8 5, behind the fork 2 12, and one alone
    assert found(DR_GIGPO, TREE, PLAIN) == [1.5 + 1.5, 1.5 - 5 / 2, 1.5 + 5 / 2, 1.5, -1.5 - 1.5]


def test_states_that_are_not_named_are_contexts() -> None:
    one = Trajectory([said(4), said(5, observation=[0], reward=1.0)])
    other = Trajectory([said(4), said(6, observation=[0])])
    assert found(DR_GIGPO, one, other) == [0.5 + 0.5, 0.5 + 0.5, -0.5 - 0.5, -0.5 - 0.5]
    apart = Trajectory([said(8), said(6, observation=[0])])
    assert found(DR_GIGPO, one, apart) == [0.5 + 0.5, 0.5, -0.5 - 0.5, -0.5]
    assert found(DR_GIGPO, one, apart, step_weight=0.0) == found("dr_grpo", one, apart)


def test_verl_agent_single_episodes_get_no_advantage_here() -> None:
    assert found(GIGPO, Trajectory([said(4, reward=5.0)])) == [0.0]
    for name in NAMES:
        assert advantage(name)(make([], [])).tolist() == []


@pytest.mark.parametrize("name", NAMES)
def test_estimator_is_biased(name: str) -> None:
    """The later return of a state that comes again is credited to the earlier action; no multiple of it is the policy
    gradient either."""
    of, expected = groups(3, forgets=True), world(forgets=True).policy_gradient()
    mean = of.mean(advantage(name)(of.table))
    scale = float((mean * expected).sum() / (mean**2).sum())
    assert float((scale * mean - expected).abs().max()) > 2e-3


@pytest.mark.parametrize("name", NAMES)
@few
@given(trees=forests(), shuffler=st.randoms())
def test_order_of_episodes_does_not_matter(name: str, trees: list[Trajectory], shuffler: Any) -> None:
    order = shuffler.sample(range(len(trees)), len(trees))
    sizes = [sum(len(turn.completion.token_ids) for turn in tree.turns) for tree in trees]
    plain = torch.tensor(found(name, *trees, discount=0.9)).split(sizes)
    moved = torch.tensor(found(name, *(trees[n] for n in order), discount=0.9)).split([sizes[n] for n in order])
    for place, n in enumerate(order):
        torch.testing.assert_close(moved[place], plain[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@few
@given(trees=forests(), shift=st.integers(-4, 4))
def test_constant_reward_of_all_episodes_changes_nothing(name: str, trees: list[Trajectory], shift: int) -> None:
    constant_changes_nothing(name, trees, shift)


@pytest.mark.parametrize("name", NAMES)
@few
@given(trees=forests(), reward=st.sampled_from([0.1, 0.3, -0.7]))
def test_equal_ways_have_exactly_no_advantage(name: str, trees: list[Trajectory], reward: float) -> None:
    assert not any(found(name, *even(trees, reward)))
