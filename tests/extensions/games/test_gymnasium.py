"""Environments of gymnasium read and are read as text; an episode is a function of its seed."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.games.gymnasium_env import GymnasiumText

LAKE = {"make": {"is_slippery": False}}


def lake(**params: Any) -> GymnasiumText:
    return GymnasiumText("FrozenLake-v1", **LAKE, **params)


def test_lake_is_a_map_and_is_crossed_by_words() -> None:
    env = lake()
    assert env.begin(0) == (
        "You are @ on a frozen lake. Walk over F to G, and not into a hole, H.\n"
        "Answer with one of: left, down, right, up.\n@FFF\nFHFH\nFFFH\nHFFG",
        "0",
    )
    steps = [env.step(word) for word in ("down", "down", "right", "down", "right", "right")]
    assert [(step.state, step.reward, step.done) for step in steps] == [
        ("4", 0.0, False),
        ("8", 0.0, False),
        ("9", 0.0, False),
        ("13", 0.0, False),
        ("14", 0.0, False),
        ("15", 1.0, True),
    ]
    assert steps[0].messages == "SFFF\n@HFH\nFFFH\nHFFG"
    env.begin(0)
    assert [env.step(word).done for word in ("right", "down")] == [False, True]  # a hole


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("right", "1"),
        ("  RIGHT.", "1"),
        ("Not down, but [right]!", "1"),
        ("right, then down", "4"),  # the last word that is one
        ("upright", "0"),
        ("rightdown", "0"),
        ("", "0"),
    ],
)
def test_last_word_that_is_an_action_is_taken(text: str, state: str) -> None:
    env = lake()
    env.begin(0)
    assert env.step(text).state == state


def test_answer_without_an_action_costs_its_penalty_alone() -> None:
    env = lake(invalid=-0.5)
    env.begin(0)
    step = env.step("I had rather not")
    assert (step.reward, step.done, step.state) == (-0.5, False, "0")
    assert step.messages == "Answer with one of: left, down, right, up.\n@FFF\nFHFH\nFFFH\nHFFG"
    assert env.step("right").state == "1"


def test_time_limit_ends_an_episode() -> None:
    env = GymnasiumText("FrozenLake-v1", make={"is_slippery": False, "max_episode_steps": 2})
    env.begin(0)
    assert [env.step("left").done for _ in range(2)] == [False, True]


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1"])
def test_episodes_are_functions_of_their_seeds(name: str) -> None:
    def told(env: GymnasiumText, seed: int) -> list[Any]:
        words = [word.strip(" .") for word in env.begin(seed)[0].partition("one of:")[2].partition("\n")[0].split(",")]
        steps = [env.step(words[-1])]
        while not steps[-1].done and len(steps) < 6:
            steps.append(env.step(words[1]))
        return [env.begin(seed)[1], steps]

    used, new = GymnasiumText(name), GymnasiumText(name)
    told(used, 7)
    assert told(used, 3) == told(new, 3)
    assert len({str(told(used, seed)) for seed in range(8)}) > 2


def test_each_toy_is_told_in_words() -> None:
    taxi = GymnasiumText("Taxi-v4")
    assert taxi.begin(3)[0].endswith(
        "+---------+\n|R: |@: :G|\n| : | : : |\n| : : : : |\n| | : | : |\n|Y| : |B: |\n+---------+\n"
        "The passenger waits at R and wants to go to Y."
    )
    cliff = GymnasiumText("CliffWalking-v1")
    assert cliff.begin(0)[0].endswith("\n............\n............\n............\n@CCCCCCCCCCG")
    assert [cliff.step(word).reward for word in ("up", "right", "down")] == [-1.0, -1.0, -100.0]
    cards = GymnasiumText("Blackjack-v1")
    assert cards.begin(3) == (
        "You play Blackjack: come close to 21, and not over it.\nAnswer with one of: stick, hit.\n"
        "You have 7. The dealer shows 10.",
        "7 10 0",
    )


def test_taxi_tells_who_is_in_it() -> None:
    taxi = GymnasiumText("Taxi-v4")
    taxi.begin(3)
    for word in ("south", "south", "west", "west", "north", "north"):
        step = taxi.step(word)
    assert "waits at R" in str(step.messages)
    assert "The passenger is in the taxi and wants to go to Y." in str(taxi.step("pickup").messages)


def loud(env: Any, observation: Any) -> str:
    return f"{type(env).__name__} {observation}!"


def test_descriptions_words_and_rules_may_be_ones_own() -> None:
    env = lake(describe=f"{__name__}:loud", actions=["west", "south", "east", "north"], rules="Go.")
    assert env.begin(0)[0] == "Go.\nAnswer with one of: west, south, east, north.\nFrozenLakeEnv 0!"
    assert env.step("south").messages == "FrozenLakeEnv 4!"


def test_what_is_not_discrete_is_printed_and_has_no_state() -> None:
    env = GymnasiumText("CartPole-v1")
    told, state = env.begin(3)
    assert told.startswith("Answer with one of: 0, 1.\n[")
    assert state == env.step("1").state == ""


@pytest.mark.parametrize(
    ("name", "params", "field", "remedy"),
    [
        ("FrozenLak-v1", {}, "task.name / task.params.make", "gymnasium rejects it: .*FrozenLake"),
        ("FrozenLake-v1", {"make": {"size": 3}}, "task.name / task.params.make", "size"),
        ("Pendulum-v1", {}, "task.name", "Only environments with Discrete or Text actions"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "task.params.actions", "It needs 4 different words"),
        ("FrozenLake-v1", {"actions": ["a", "b", "c", "A"]}, "task.params.actions", "4 different words"),
        ("FrozenLake-v1", {"describe": "nowhere:it"}, "task.params.describe", "Must be an import path"),
    ],
)
def test_wrong_settings_name_field_value_and_remedy(name: str, params: dict, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        GymnasiumText(name, **params)
    assert caught.value.field == field
