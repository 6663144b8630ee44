"""Attempts with guidance: behind it, apart from those without, and rewarded for themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.samples import build_samples
from asyncrl.algo.table import build_table
from asyncrl.errors import ConfigError
from asyncrl.extensions.games.higher_lower import HigherLower
from asyncrl.schema import Group, Message, Trajectory
from asyncrl_recipes.guided.agent import Guided
from asyncrl_recipes.guided.hints import half
from tests.agents.talking import Spoken, written
from tests.agents.worlds import PROMPT, play
from tests.algo.tables import advantage

told: list[tuple[dict[str, Any], list[Message]]] = []


async def hint(question: dict[str, Any], transcript: list[Message]) -> str:
    told.append((question, transcript))
    return "8"


def silent(question: dict[str, Any], transcript: list[Message]) -> str:
    return ""


def attempts(*answers: int, guide: str = "hint", **params: Any) -> tuple[Trajectory, Any]:
    """An attempt ends with 9 or more, and is worth an eighth of it."""
    told.clear()
    make = partial(Guided, guide=f"{__name__}:{guide}", **params)
    return play(make, [written(*map(int, str(n)), 10) for n in answers], template=Spoken())


def test_attempt_that_failed_is_followed_by_one_behind_guidance() -> None:
    found, generate = attempts(4, 5, 9, threshold=2.0)
    assert [one.context for one in generate.asked] == [[12, 1, 11], [12, 1, 11, 4, 10, 4, 11], [12, 1, 8, 11]]
    assert [(turn.role, turn.begins) for turn in found.turns] == [("", False), ("", False), ("guided", True)]
    assert found.totals() == {"": 9 / 8, "guided": 9 / 8}
    guided = build_samples([Group("g", 0, PROMPT.token_ids, [found], "t")])[0][1]
    assert (guided.prompt_ids, guided.token_ids, guided.mask) == ([12, 1, 8, 11], [9, 10], [True, True])


def test_guide_is_told_the_question_and_what_was_said() -> None:
    attempts(4, 5, 9, threshold=2.0)
    ((question, transcript),) = told
    assert question is PROMPT.question
    assert [(one["role"], one["content"]) for one in transcript] == [
        ("user", "1"),
        ("assistant", "4"),
        ("user", "4"),
        ("assistant", "5"),
        ("user", "9"),
    ]


def test_attempt_that_succeeds_or_cannot_be_helped_is_last() -> None:
    assert [turn.role for turn in attempts(9, threshold=1.0)[0].turns] == [""]
    assert [turn.role for turn in attempts(9, threshold=2.0, guide="silent")[0].turns] == [""]
    assert [turn.role for turn in attempts(9, 16, 9, threshold=2.0, tries=5)[0].turns] == ["", "guided"]


def test_attempt_is_worth_all_of_its_turns() -> None:
    make = partial(Guided, guide=f"{__name__}:hint", threshold=2.5)
    found, _ = play(make, [written(4, 10), written(5, 10)], template=Spoken(), each=1.0)
    assert [turn.reward for turn in found.turns] == [1.0, 1.0 + 9 / 8]  # the last one alone would be too little


def test_each_attempt_is_a_role_of_its_own() -> None:
    found, _ = attempts(9, 9, 9, 9, threshold=2.0, tries=2)
    assert [turn.role for turn in found.turns] == ["", "guided", "guided2"]
    assert len(told) == 2
    assert [one["content"] for one in told[1][1]] == ["1\n\n8", "9", "9"]  # what the second attempt was


def test_help_is_neither_credited_nor_held_against_others() -> None:
    trajectories = [attempts(n, 16, threshold=2.0)[0] for n in (9, 12)] + [attempts(16, threshold=2.0)[0]]
    table = build_table([Group("g", 0, PROMPT.token_ids, trajectories, "t")], 0)
    for name in {"rloo", "turn_loo"} & {*ADVANTAGES}:
        advantages = (advantage(name)(table) * 8).tolist()  # of tokens
        expected = [9 - 14.0] * 2 + [0.0] * 3 + [12 - 12.5] * 3 + [0.0] * 3 + [16 - 10.5] * 3
        assert advantages == pytest.approx(expected, abs=1e-12)


def test_due_of_an_attempt_counts_and_none_is_refused() -> None:
    make = partial(Guided, guide=f"{__name__}:hint", threshold=0.125, max_turns=1)
    assert len(play(make, [written(4, 10)], template=Spoken(), scored=99)[0].turns) == 1
    with pytest.raises(ValueError, match="leaves the reward to the task"):
        play(make, [written(4, 10)], template=Spoken(), scored=0)


def test_guides_that_are_none_and_no_tries_are_refused() -> None:
    with pytest.raises(ConfigError, match="import path") as refused:
        Guided(None, guide="nowhere:guide")  # type: ignore[arg-type]
    assert refused.value.field == "agent_params.guide"
    with pytest.raises(ConfigError, match="1 or more"):
        Guided(None, guide=f"{__name__}:hint", tries=0)  # type: ignore[arg-type]


def test_hint_of_the_experiment_is_the_half_with_the_secret() -> None:
    game = HigherLower()
    for question in map(game.question, range(50)):
        game.reset(question)
        assert half(question, []) == (game.step("4").messages or "0")  # 4 itself is in the lower half
