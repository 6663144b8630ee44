"""Sums, gates and steps over parts that are sync, async or both; and who is not asked, or given up, when one fails.

A coroutine that is left without being awaited fails the test that leaves it: pytest makes an error of the warning.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.combine.combine import GatedReward, WeightedReward
from asyncrl.extensions.combine.process import ProcessReward
from asyncrl.rewards import RewardInput, Score, build
from tests.rewards.doubles import Fixed, Later, answer

NUMBERS = st.floats(-100, 100)
A = answer("first", "second")


def score(reward: Any, one: RewardInput = A) -> Score:
    async def main() -> Any:
        result = reward(one)
        async with asyncio.timeout(60):
            return await result if inspect.isawaitable(result) else result

    found = asyncio.run(main())
    assert isinstance(found, Score)
    return found


# --- sums ---------------------------------------------------------------------------------------------------


def test_sum_is_weighted_and_names_its_parts_and_theirs() -> None:
    parts = {
        "right": (Fixed(1.0), 2.0),
        "judged": (Later(Score(0.5, parts={"judge/spread": 0.1})), 1.0),
        "long": (Fixed(3.0), -0.5),
    }
    assert score(WeightedReward(parts)) == Score(
        1.0, [], {"right": 1.0, "judged": 0.5, "judged/judge/spread": 0.1, "long": 3.0}
    )


def test_rewards_of_turns_are_summed_by_weight_too() -> None:
    parts = {
        "a": (Fixed(Score(0.0, [1.0, 2.0])), 2.0),
        "b": (Fixed(1.0), 1.0),
        "c": (Fixed(Score(0.0, [1.0, 0.0])), 1.0),
    }
    assert score(WeightedReward(parts)).turns == [3.0, 4.0]


def test_sync_parts_alone_need_no_event_loop() -> None:
    assert WeightedReward({"a": (Fixed(1.0), 1.0)})(A) == Score(1.0, [], {"a": 1.0})


@given(st.lists(st.tuples(NUMBERS, st.floats(0, 10)), min_size=1, max_size=5), st.integers(0, 4), st.floats(0, 10))
def test_sum_rises_with_any_positive_part_without_order(
    pairs: list[tuple[float, float]], place: int, more: float
) -> None:
    def total(pairs: list[tuple[float, float]]) -> float:
        found = WeightedReward({str(n): (Fixed(value), weight) for n, (value, weight) in enumerate(pairs)})(A)
        assert isinstance(found, Score)
        return found.reward

    place %= len(pairs)
    raised = list(pairs)
    raised[place] = (pairs[place][0] + more, pairs[place][1])
    assert total(raised) >= total(pairs)
    assert total(pairs) == total(pairs[::-1])


def test_parts_from_a_configuration_have_weight_1() -> None:
    reward = build("weighted", {"parts": {"a": {"use": "exact"}, "b": {"use": "contains", "weight": 3.0}}})
    assert reward(answer("It is 4", answer="4")) == Score(3.0, [], {"a": 0.0, "b": 1.0})


def test_whole_is_inline_and_pure_as_all_of_its_parts_are() -> None:
    for inline in (True, False):
        for pure in (True, False):
            parts = {"a": (Fixed(1.0), 1.0), "b": (Fixed(1.0, inline, pure), 1.0)}
            for whole in (
                WeightedReward(parts),
                GatedReward(Fixed(1.0), Fixed(1.0, inline, pure)),
                ProcessReward(Fixed(1.0, inline, pure)),
            ):
                assert (whole.inline, whole.pure) == (inline, pure)


def test_first_failure_is_heard_as_it_is_and_ends_the_others() -> None:
    async def main() -> None:
        hanging = Later(1.0, until=asyncio.Event())
        failing = Later(EpisodeFailed("judge", "down"))
        with pytest.raises(EpisodeFailed, match="judge: down"):
            await asyncio.wait_for(WeightedReward({"a": (hanging, 1.0), "b": (failing, 1.0)})(A), 10)  # type: ignore[arg-type]
        assert (hanging.begun, hanging.cancelled) == (1, 1)

    asyncio.run(main())


def test_sync_part_that_raises_gives_up_what_was_asked_before_it() -> None:
    async_part = Later(1.0)
    with pytest.raises(KeyError):
        WeightedReward({"a": (async_part, 1.0), "b": (Fixed(KeyError("no")), 1.0)})(A)
    assert (async_part.asked, async_part.begun) == (1, 0)


def test_result_that_nobody_awaits_can_be_given_up() -> None:
    inner = WeightedReward({"a": (Later(1.0), 1.0)})
    result: Any = WeightedReward({"inner": (inner, 1.0)})(A)
    result.close()


def test_score_of_a_part_that_is_none_fails_the_episode() -> None:
    for part in (Fixed(float("nan")), Later(float("nan")), Fixed(Score(0.0, [1.0]))):
        with pytest.raises(EpisodeFailed) as caught:
            score(WeightedReward({"a": (part, 1.0), "b": (Later(1.0), 1.0)}))
        assert caught.value.reason == "reward_error"


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({}, "parts"),
        ({"a": {"use": "exact", "weight": "2"}}, "parts.a.weight"),
        ({"a": {"use": "exact", "weight": float("nan")}}, "parts.a.weight"),
        ({"a": {"use": "exact", "wight": 2.0}}, "parts.a"),
        ({"a": {"weight": 2.0}}, "parts.a"),
        ({"a": {"use": 7}}, "parts.a"),
        ({"a": {"use": "exact", "params": 7}}, "parts.a"),
        ({"a": {"use": "nearly"}}, "parts.a.use"),
        ({"a": ("no reward", 1.0)}, "parts.a.use"),
    ],
)
def test_wrong_parts_are_named(parts: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WeightedReward(parts)
    assert caught.value.field == field


# --- gates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [Fixed, Later])
@pytest.mark.parametrize("behind", [Fixed, Later])
def test_gate_multiplies_and_behind_a_shut_one_nothing_is_asked(gate: Any, behind: Any) -> None:
    reward = behind(Score(4.0, [1.0, 2.0], {"x": 1.0}))
    assert score(GatedReward(gate(0.5), reward)) == Score(2.0, [0.5, 1.0], {"gate": 0.5, "gated": 4.0, "gated/x": 1.0})
    shut = behind(1.0)
    assert score(GatedReward(gate(0.0), shut)) == Score(0.0, parts={"gate": 0.0})
    assert shut.asked == 0


def test_threaded_reward_is_asked_where_the_call_is_made() -> None:
    """An async gate is known only in the event loop, where a reward that may hang must not be called."""
    behind = Fixed(4.0, inline=False)
    result = GatedReward(Later(0.0), behind)(A)
    assert behind.asked == 1
    assert asyncio.run(_awaited(result)).reward == 0.0


def test_failure_of_gate_or_reward_is_the_episodes() -> None:
    for gate in (
        GatedReward(Later(EpisodeFailed("judge")), Fixed(1.0)),
        GatedReward(Fixed(1.0), Later(EpisodeFailed("judge"))),
        GatedReward(Later(1.0), Later(EpisodeFailed("judge"))),
    ):
        with pytest.raises(EpisodeFailed, match="judge"):
            score(gate)


async def _awaited(result: Any) -> Any:
    return await result


# --- steps --------------------------------------------------------------------------------------------------


def length(one: RewardInput) -> float:
    return float(len(one.text) + 10 * len(one.texts))


@pytest.mark.parametrize("step", [Fixed, Later])
@pytest.mark.parametrize(
    ("into", "reward", "turns"),
    [
        ("turns", 0.0, [15.0, 26.0]),
        ("min", 15.0, []),
        ("mean", 20.5, []),
        ("sum", 41.0, []),
        ("last", 26.0, []),
    ],
)
def test_every_turn_is_scored_as_the_episode_stood_then(
    step: Any, into: Any, reward: float, turns: list[float]
) -> None:
    found = score(ProcessReward(step(length), into))
    assert (found.reward, list(found.turns)) == (reward, turns)
    assert found.parts["steps/lowest"] == 15.0


def test_parts_of_steps_are_means_over_the_steps_that_have_them() -> None:
    says = lambda one: Score(0.0, parts={"x": len(one.texts), **({"y": 5.0} if len(one.texts) > 1 else {})})  # noqa: E731
    assert score(ProcessReward(Fixed(says))).parts == {"x": 1.5, "y": 5.0, "steps/lowest": 0.0}


def test_step_that_fails_fails_the_episode() -> None:
    with pytest.raises(EpisodeFailed, match="judge"):
        score(ProcessReward(Later(lambda one: 1 / 0 if len(one.texts) == 9 else _fail())))


def _fail() -> float:
    raise EpisodeFailed("judge")


def test_closing_closes_every_part() -> None:
    parts = [Fixed(1.0) for _ in range(4)]
    whole = WeightedReward(
        {"a": (GatedReward(parts[0], parts[1]), 1.0), "b": (ProcessReward(parts[2]), 1.0), "c": (parts[3], 1.0)}
    )
    asyncio.run(whole.close())
    assert all(part.closed for part in parts)


def test_error_in_a_reward_within_others_names_the_way_to_it() -> None:
    inner = {"use": "exact", "params": {"answer_key": 1}}
    params = {"parts": {"one": {"use": "gate", "params": {"gate": {"use": "exact"}, "reward": inner}}}}
    with pytest.raises(ConfigError) as caught:
        build("weighted", params)
    assert caught.value.field == "reward.params.parts.one.params.reward.params.answer_key"
