"""Every answer that engines wrote is trained once, behind the very tokens that they read before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.linking import check, link
from asyncrl.algo.samples import build_samples
from asyncrl.schema import Exchange, Group, Trajectory, Turn
from tests.agents.talking import written

P = [12, 1, 11]


def test_context_that_grows_is_one_sample() -> None:
    a, b = written(4, 10), written(5, 10)
    turns = link(P, [Exchange(P, a), Exchange([*P, 4, 10, 7, 11], b)])
    assert turns == [Turn([], a), Turn([7, 11], b)]


def test_first_request_may_say_more_than_the_prompt() -> None:
    a = written(4, 10)
    assert link(P, [Exchange([*P, 9], a)]) == [Turn([9], a)]


def test_branch_begins_a_sample_with_its_shared_context() -> None:
    a, b, c = written(4, 10), written(5, 10), written(6, 10)
    turns = link(P, [Exchange(P, a), Exchange([*P, 4, 10, 7], b), Exchange([*P, 4, 10, 8], c)])
    assert turns == [Turn([], a), Turn([7], b), Turn([*P, 4, 10, 8], c, begins=True)]


def test_two_answers_to_the_same_context_are_two_samples() -> None:
    a, b = written(4, 10), written(4, 10)
    turns = link(P, [Exchange(P, a), Exchange(P, b)])
    assert turns == [Turn([], a), Turn(P, b, begins=True)]


def test_context_goes_on_from_the_longest_of_its_beginnings() -> None:
    a, b, c = written(4), written(4, 10), written(6, 10)
    turns = link(P, [Exchange(P, a), Exchange(P, b), Exchange([*P, 4, 10, 7], c)])
    assert turns == [Turn([], a), Turn(P, b, begins=True), Turn([7], c)]


def test_the_same_tokens_in_another_order_are_another_context() -> None:
    a, b = written(4, 10), written(5, 10)
    assert link(P, [Exchange([1, 12, 11], a)]) == [Turn([1, 12, 11], a, begins=True)]
    assert link(P, [Exchange(P, a), Exchange([*P, 10, 4, 7], b)])[1].begins


def test_reset_context_begins_a_sample_and_goes_on_in_it() -> None:
    a, b, c = written(4, 10), written(5, 10), written(6, 10)
    turns = link(P, [Exchange(P, a), Exchange([12, 3, 11], b), Exchange([12, 3, 11, 5, 10, 2], c)])
    assert turns == [Turn([], a), Turn([12, 3, 11], b, begins=True), Turn([2], c)]


def test_interleaved_conversations_stand_by_their_sample() -> None:
    """Two at once, as sub-agents talk."""
    a, b, c, d = (written(n, 10) for n in (4, 5, 6, 7))
    other = [12, 9, 11]
    asked = [
        Exchange(P, a),
        Exchange(other, b),
        Exchange([*P, 4, 10, 1], c),
        Exchange([*other, 5, 10, 2], d),
    ]
    assert link(P, asked) == [Turn([], a), Turn([1], c), Turn(other, b, begins=True), Turn([2], d)]


def test_roles_have_samples_of_their_own_even_in_one_context() -> None:
    a, b = written(4, 10), written(5, 10)
    turns = link(P, [Exchange(P, a, "white"), Exchange([*P, 4, 10, 7], b, "black")])
    assert turns == [Turn([], a, role="white"), Turn([4, 10, 7], b, role="black")]


conversations = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=8)


@given(conversations)
def test_what_is_linked_is_what_was_asked_whatever_the_agent_did(steps: list[tuple[int, int, int]]) -> None:
    """Each step goes on from the prompt, from the last answer, or from the one before that, with some more said."""
    asked: list[Exchange] = []
    for number, (back, said, length) in enumerate(steps):
        base = P if back == 0 or len(asked) < back else [*asked[-back].context, *asked[-back].completion.token_ids]
        answer = written(*[20 + number] * length, 10)
        asked.append(Exchange([*base, *range(said)], answer))
    trajectory = Trajectory(link(P, asked))
    check(trajectory, P, asked)
    group = Group("g", 0, P, [trajectory], "t")
    samples = build_samples([group])[0]
    found = []
    for sample in samples:
        ids, mask = [*sample.prompt_ids, *sample.token_ids], [False] * len(sample.prompt_ids) + sample.mask
        start = None
        for at in range(len(ids) + 1):
            inside = at < len(ids) and mask[at]
            if inside and start is None:
                start = at
            if start is not None and at > start and (not inside or ids[at - 1] == 10):
                found.append((ids[:start], ids[start:at]))
                start = at if inside else None
    assert sorted(found) == sorted((one.context, one.completion.token_ids) for one in asked)


def two_turns(*, said: int = 7) -> tuple[list[Turn], list[Exchange]]:
    a, b = written(4, 10), written(5, 10)
    return [Turn([], a), Turn([said], b)], [Exchange(P, a), Exchange([*P, 4, 10, 7], b)]


def test_turn_behind_tokens_the_engine_never_read_is_refused() -> None:
    turns, asked = two_turns(said=8)
    with pytest.raises(ValueError, match=r"turn 1 follows other tokens .* \(token 5 is 8 in the place of 7\)"):
        check(Trajectory(turns), P, asked)


def test_turn_that_was_made_up_or_told_twice_is_refused() -> None:
    turns, asked = two_turns()
    made_up = Turn([7], written(6, 10))
    with pytest.raises(ValueError, match="turn 1 holds tokens that no engine wrote"):
        check(Trajectory([turns[0], made_up]), P, asked)
    again = Turn(P, turns[0].completion, begins=True)
    with pytest.raises(ValueError, match="turn 2 holds tokens that no engine wrote for it, or that another turn holds"):
        check(Trajectory([*turns, again]), P, asked)


def test_trajectory_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="has no turn"):
        check(Trajectory([]), P, two_turns()[1])


def test_answers_may_be_copied_and_told_in_another_order() -> None:
    """Each of two equal answers is linked to its own context."""
    first, second = written(4, 10), written(4, 10)
    asked = [Exchange(P, first), Exchange([9], second)]
    check(Trajectory([Turn([9], second, begins=True), Turn(P, first, begins=True)]), P, asked)
    check(Trajectory([Turn([], written(4, 10))]), P, asked)  # as what went over a wire is


def test_answers_may_be_left_out() -> None:
    turns, asked = two_turns()
    check(Trajectory(turns[:1]), P, asked)
    check(Trajectory([Turn([*P, 4, 10, 7], turns[1].completion, begins=True)]), P, asked)


def test_same_ids_with_other_images_begin_samples() -> None:
    a, b, c = written(5, 10), written(6, 10), written(7, 10)
    asked = [
        Exchange(P, a, images=["one"]),
        Exchange([*P, 5, 10, 9], b, images=["other", "two"]),
        Exchange([*P, 5, 10, 9], c, images=["one", "two"]),
    ]
    found = link(P, asked, ["one"])
    assert [(turn.begins, turn.images) for turn in found] == [(False, []), (False, ["two"]), (True, ["other", "two"])]
    assert [turn.completion for turn in found] == [a, c, b]
    (other,) = link(P, [Exchange(P, a, images=["other"])], ["one"])
    assert (other.begins, other.images) == (True, ["other"])
