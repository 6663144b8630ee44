"""Groups become samples with masks over turns and one denominator for the whole step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.samples import Sample, build_samples, shares
from asyncrl.algo.table import build_table
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.algo.tables import advantage, cut
from tests.fakes import completion

AGGREGATIONS = ["token", "sequence", "constant"]
LONGEST = 10


def group(slot: int, lengths: list[int]) -> Group:
    answers = [completion(tokens=n) if n else Completion([], [], [], "stop") for n in lengths]
    return Group(f"g{slot}", slot, [12, slot, 11], [Trajectory([Turn([], one)]) for one in answers], "made")


def weights(groups: list[Group], aggregation: str, chosen: list[Sample] | None = None) -> torch.Tensor:
    """[N] of a step over all samples, or those chosen."""
    samples = chosen if chosen is not None else [sample for one in build_samples(groups) for sample in one]
    return shares(build_table(groups, 0), samples, aggregation, LONGEST)


@pytest.mark.parametrize(("mask", "inputs"), [("11001", 6), ("1100", 3), ("1", 2), ("000", 0), ("", 0)])
def test_tokens_are_read_up_to_the_one_before_the_last_trained(mask: str, inputs: int) -> None:
    """The prompt has two tokens."""
    assert Sample([12, 11], [5] * len(mask), [one == "1" for one in mask], 0, 0).num_inputs == inputs


def test_denominators_by_hand() -> None:
    groups = [group(0, [1, 3]), group(1, [2, 4])]  # 10 tokens, 4 sequences
    assert weights(groups, "token").tolist() == [1 / 10] * 10
    assert weights(groups, "sequence").tolist() == [1 / 4] + [1 / 12] * 3 + [1 / 8] * 2 + [1 / 16] * 4
    assert weights(groups, "constant").tolist() == [1 / 40] * 10


def test_step_over_some_samples_keeps_their_denominator() -> None:
    groups = [group(0, [1, 3]), group(1, [2, 4])]
    second = build_samples(groups)[1]  # 6 tokens, 2 sequences
    assert weights(groups, "token", second).tolist() == [0.0] * 4 + [1 / 6] * 6
    assert weights(groups, "sequence", second).tolist() == [0.0] * 4 + [1 / 4] * 2 + [1 / 8] * 4
    assert weights(groups, "constant", second).tolist() == [0.0] * 4 + [1 / 20] * 6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_each_adapter_has_the_denominator_of_its_samples_alone(aggregation: str) -> None:
    turns = [
        [Turn([], completion(tokens=n), role="a"), Turn([5], completion(tokens=n + 1), role="b")] for n in (1, 2, 3)
    ]
    made = [Group("g", 0, [12, 11], [Trajectory(one) for one in turns], "made"), group(1, [4, 2])]
    samples = [one for of in build_samples(made, lambda role: "solver" if role == "b" else "policy") for one in of]
    assert [one.model for one in samples] == ["policy", "solver"] * 3 + ["policy"] * 2
    alone = [weights(made, aggregation, [one for one in samples if one.model == name]) for name in ("policy", "solver")]
    assert weights(made, aggregation, samples).equal(alone[0] + alone[1])
    if aggregation != "constant":
        assert [one.sum().item() for one in alone] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_step_over_no_sample_gives_nothing(aggregation: str) -> None:
    assert weights([group(0, [2, 3])], aggregation, []).tolist() == [0.0] * 5


def test_only_what_the_policy_wrote_is_trained_in_joined_turns() -> None:
    first = Completion([7, 8], [-0.1, -0.2], [VersionSpan(0, 0, 2)], "stop")
    second = Completion([9], [-0.3], [VersionSpan(1, 0, 1)], "stop")
    played = Trajectory([Turn([], first), Turn([50, 51], second)], 1.0)
    groups = [Group("g", 0, [12, 11], [played, Trajectory([Turn([], first)], 0.0)], "made")]
    ((sample, sibling),) = build_samples(groups)
    assert sample.prompt_ids == [12, 11]
    assert sample.token_ids == [7, 8, 50, 51, 9]
    assert sample.mask == [True, True, False, False, True]
    assert (sample.number, sample.first_row, sample.num_trained) == (0, 0, 3)
    assert (sibling.number, sibling.first_row, sibling.num_trained) == (1, 3, 2)
    assert weights(groups, "token").tolist() == [1 / 5] * 5  # observations do not count


def test_rows_and_numbers_go_on_from_group_to_group() -> None:
    found = build_samples([group(0, [2, 0]), group(1, [3])])
    assert [[(one.number, one.first_row) for one in samples] for samples in found] == [[(0, 0), (1, 2)], [(2, 2)]]


lengths = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5)


@given(lengths, st.sampled_from(AGGREGATIONS), st.randoms())
def test_weights_do_not_depend_on_order_in_groups(sizes, aggregation, shuffler: random.Random) -> None:
    groups = [group(i, one) for i, one in enumerate(sizes)]
    shuffled = [
        Group(g.uid, g.slot, g.prompt_ids, shuffler.sample(g.trajectories, len(g.trajectories)), g.task) for g in groups
    ]
    shuffler.shuffle(shuffled)

    def by_sample(of: list[Group]) -> list[tuple]:
        found = weights(of, aggregation)
        samples = [sample for one in build_samples(of) for sample in one]
        return sorted((s.prompt_ids[1], s.num_trained, float(found[s.first_row])) for s in samples)

    assert by_sample(groups) == by_sample(shuffled)


@given(lengths)
def test_shares_add_up_to_one_step(sizes: list[list[int]]) -> None:
    groups = [group(i, one) for i, one in enumerate(sizes)]
    for aggregation in ("token", "sequence"):
        assert float(weights(groups, aggregation).sum()) == pytest.approx(1.0, abs=1e-14)  # float32 would miss


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_empty_answer_changes_no_weight_of_the_others(aggregation: str) -> None:
    full = weights([group(0, [2, 3])], aggregation).tolist()
    assert weights([group(0, [2, 3]), group(1, [0, 0])], aggregation).tolist() == full
    assert weights([group(0, [2, 0, 3])], aggregation).tolist() == full


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_cuts_of_an_episode_change_no_weight_or_advantage(sizes, data) -> None:
    """Nor what any token is predicted from."""

    def episode(lengths: list[int]) -> Trajectory:
        rewards = data.draw(st.lists(st.integers(-2, 2), min_size=len(lengths), max_size=len(lengths)))
        turns = [
            Turn(
                [50] if place else [], completion(tokens=length), float(reward), state=data.draw(st.sampled_from("ab"))
            )
            for place, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
        ]
        return Trajectory(turns, float(data.draw(st.integers(0, 3))))

    prompt = [12, 11]
    whole = [episode(lengths) for lengths in sizes]
    places = [data.draw(st.sets(st.integers(1, max(1, len(one.turns) - 1)))) for one in whole]
    groups = [Group("g", 0, prompt, whole, "made")]
    pieces = [Group("g", 0, prompt, [cut(one, prompt, at) for one, at in zip(whole, places, strict=True)], "made")]
    for aggregation in AGGREGATIONS:
        assert weights(pieces, aggregation).tolist() == weights(groups, aggregation).tolist()
    tables = [build_table(of, 0) for of in (groups, pieces)]
    for name in set(ADVANTAGES) - {"gae", "maxrl"}:  # these need a critic, and rewards that are not negative
        found, expected = (advantage(name, discount=0.9)(table) for table in tables)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def contexts(of: list[Group]) -> list[tuple[list[int], int]]:
        found = []
        for sample in (one for group in build_samples(of) for one in group):
            ids = [*sample.prompt_ids, *sample.token_ids]
            first = len(sample.prompt_ids)
            found += [(ids[: first + i], ids[first + i]) for i, mine in enumerate(sample.mask) if mine]
        return found

    assert contexts(pieces) == contexts(groups)
