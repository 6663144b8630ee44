"""From groups to samples: masks over turns, and one denominator for the whole step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.samples import build_samples
from asyncrl.types import Completion, Group, Trajectory, Turn, VersionSpan
from tests.fakes import completion

AGGREGATIONS = ["token", "sequence", "constant"]


def group(slot: int, lengths: list[int], rewards: list[float]) -> Group:
    members = [
        Trajectory([Turn([], completion(tokens=length))], reward)
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    return Group(f"g{slot}", slot, [12, slot, 11], members, "made")


def build(groups: list[Group], aggregation: str, advantage: str = "dr_grpo") -> list[list[Any]]:
    return build_samples(groups, advantage=advantage, aggregation=aggregation, longest=10)


def test_denominators_by_hand() -> None:
    groups = [group(0, [1, 3], [0.0, 1.0]), group(1, [2, 4], [1.0, 1.0])]  # 10 tokens, 4 sequences
    weights = {name: [[sample.token_weight for sample in one] for one in build(groups, name)] for name in AGGREGATIONS}
    assert weights["token"] == [[0.1, 0.1], [0.1, 0.1]]
    assert weights["sequence"] == [[1 / 4, 1 / 12], [1 / 8, 1 / 16]]
    assert weights["constant"] == [[1 / 40] * 2] * 2


def test_advantages_are_those_of_the_own_group() -> None:
    found = build([group(0, [1, 1], [0.0, 1.0]), group(1, [1, 1], [5.0, 9.0])], "token")
    assert [[sample.advantage for sample in one] for one in found] == [[-0.5, 0.5], [-2.0, 2.0]]


def test_turns_are_joined_and_only_what_the_policy_wrote_is_trained() -> None:
    first = Completion([7, 8], [-0.1, -0.2], [VersionSpan(0, 0, 2)], "stop")
    second = Completion([9], [-0.3], [VersionSpan(1, 0, 1)], "stop")
    played = Trajectory([Turn([], first), Turn([50, 51], second)], 1.0)
    ((sample, _),) = build([Group("g", 0, [12, 11], [played, Trajectory([Turn([], first)], 0.0)], "made")], "token")
    assert sample.prompt_ids == [12, 11]
    assert sample.token_ids == [7, 8, 50, 51, 9]
    assert sample.mask == [True, True, False, False, True]
    assert sample.logprobs == [-0.1, -0.2, 0.0, 0.0, -0.3]
    assert sample.num_trained == 3
    assert sample.token_weight == 1 / 5  # 3 of this one and 2 of its sibling; observations do not count


lengths = st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=5)


@given(lengths, st.sampled_from(AGGREGATIONS), st.randoms())
def test_weights_do_not_depend_on_the_order_of_groups_and_members(sizes, aggregation, shuffler: random.Random) -> None:
    groups = [group(i, one, [float(j) for j in range(len(one))]) for i, one in enumerate(sizes)]
    shuffled = [
        Group(g.uid, g.slot, g.prompt_ids, shuffler.sample(g.trajectories, len(g.trajectories)), g.task) for g in groups
    ]
    shuffler.shuffle(shuffled)

    def shares(of: list[Group]) -> list[tuple]:
        return sorted(
            (s.prompt_ids[1], len(s.token_ids), s.advantage, s.token_weight)
            for one in build(of, aggregation)
            for s in one
        )

    assert shares(groups) == shares(shuffled)


@given(lengths)
def test_shares_add_up_to_one_step(sizes: list[list[int]]) -> None:
    groups = [group(i, one, [0.0] * len(one)) for i, one in enumerate(sizes)]
    for aggregation in ("token", "sequence"):
        total = sum(s.token_weight * s.num_trained for one in build(groups, aggregation) for s in one)
        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_empty_answer_changes_no_weight_of_the_others(aggregation: str) -> None:
    full = group(0, [2, 3], [0.0, 1.0])
    empty = Trajectory([Turn([], Completion([], [], [], "stop"))], 0.0)
    with_empty = Group("g", 1, [12, 1, 11], [empty, empty], "made")
    alone, beside = build([full], aggregation), build([full, with_empty], aggregation)
    assert [s.token_weight for s in alone[0]] == [s.token_weight for s in beside[0]]
