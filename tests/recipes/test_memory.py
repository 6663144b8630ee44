"""Contexts that begin anew with the question and notes: each a sample, all one episode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.table import build_table
from asyncrl.schema import Completion, Group, Trajectory
from asyncrl_recipes.memory.agent import Memory
from tests.agents.talking import Spoken, written
from tests.agents.worlds import PROMPT, play
from tests.algo.tables import advantage


class Lines(Spoken):
    """Also what is said later."""

    def extend(self, messages: Any, *, last: int | None) -> list[int]:
        digits = ["".join(c for c in one["content"] if c.isdigit()) for one in messages]
        return super().extend([{"content": one} for one in digits], last=last)


def run(*answers: Completion, **params: Any) -> tuple[Trajectory, Any]:
    world = {"hello": params.pop("hello", ""), "scored": params.pop("scored", None)}
    return play(partial(Memory, ask="77", notes="6{notes}", **params), answers, template=Lines(), **world)


def test_context_begins_anew_with_the_question_and_the_notes() -> None:
    found, generate = run(written(4, 10), written(2, 3, 10), written(5, 10), note_tokens=3)
    assert [one.context for one in generate.asked] == [
        [12, 1, 11],
        [12, 1, 11, 4, 10, 4, 7, 7, 11],  # what 4 led to, and the request for notes
        [12, 1, 6, 2, 3, 11],
    ]
    assert generate.limits == [None, 3, None]
    assert [turn.begins for turn in found.turns] == [False, False, True]
    assert [turn.reward for turn in found.turns] == [0.0, 0.0, 9 / 8]
    assert [turn.state for turn in found.turns] == ["s0", "", "s4"]
    assert len(found.samples()) == 2


def test_contexts_with_room_go_on() -> None:
    answers = [written(2, 10), written(2, 10), written(3, 10), written(5, 10)]
    found, generate = run(*answers, context_tokens=5)  # as many after the first answer, 9 after the second
    assert [turn.begins for turn in found.turns] == [False, False, False, True]
    assert generate.asked[1].context == [12, 1, 11, 2, 10, 2, 11]
    assert generate.asked[3].context == [12, 1, 6, 3, 11]


def test_what_a_reset_tells_stays_with_the_question() -> None:
    _, generate = run(written(4, 10), written(3, 10), written(5, 10), hello="2")
    assert generate.asked[2].context == [12, 1, 2, 6, 3, 11]


def test_all_samples_are_trained_with_what_the_episode_came_to() -> None:
    trajectories = [run(written(4, 10), written(3, 10), written(n, 10))[0] for n in (5, 9)]
    table = build_table([Group("g", 0, PROMPT.token_ids, trajectories, "t")], 0)
    assert table.num_samples == 4
    for name in {"rloo", "turn_discounted", "turn_loo"} & {*ADVANTAGES}:
        found = advantage(name)(table) * 8
        assert found.tolist() == [9 - 13.0] * 6 + [13 - 9.0] * 6


def test_notes_are_no_turns_and_none_follow_the_last() -> None:
    found, _ = run(written(1, 10), written(3, 10), written(1, 10), max_turns=2)
    assert [turn.completion.token_ids[0] for turn in found.turns] == [1, 3, 1]


@pytest.mark.parametrize(("notes", "turns"), [(written(finish="length"), 2), (written(3, finish="length"), 3)])
def test_cut_notes_are_notes_and_none_is_the_end(notes: Completion, turns: int) -> None:
    found, _ = run(written(4, 10), notes, written(5, 10))
    assert len(found.turns) == turns


def test_task_scores_the_last_answer_where_said() -> None:
    found, _ = run(written(4, 10), written(3, 10), written(1, 10), max_turns=2, scored=0)
    assert (found.reward, [turn.reward for turn in found.turns]) == (None, [0.0, 0.0, 0.125])


def test_answer_that_was_cut_off_is_the_last() -> None:
    assert len(run(written(4, finish="length"), written(3, 10))[0].turns) == 1
