"""A conversation holds the ids that engines read and wrote, whatever its agent does in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncrl.agents.chat import Chat
from asyncrl.agents.linking import check, link
from asyncrl.schema import Prompt, Trajectory
from tests.agents.talking import Talking, written

PROMPT = Prompt("p", [12, 1, 11], {}, "t")


def play(script: Callable[[Chat], Coroutine[Any, Any, None]], *answers: Any, **chat: Any) -> tuple[Trajectory, Talking]:
    """Run the script on a chat that continues the prompt or starts with `messages`."""

    async def main() -> tuple[Trajectory, Talking]:
        generate = Talking(answers)
        talk = Chat(generate, **chat) if chat else Chat.of(PROMPT, generate)
        await script(talk)
        return talk.trajectory(), generate

    return asyncio.run(main())


async def twice(chat: Chat) -> None:
    assert await chat.answer() == "4"
    chat.say("7")
    chat.say("8")
    assert await chat.answer(max_new_tokens=3, state="s") == "5"


def test_each_turn_reads_what_was_written_and_then_what_was_said() -> None:
    found, generate = play(twice, written(4, 10), written(5, 10))
    assert [one.context for one in generate.asked] == [[12, 1, 11], [12, 1, 11, 4, 10, 7, 8, 11]]
    assert [turn.observation for turn in found.turns] == [[], [7, 8, 11]]
    assert generate.limits == [None, 3]
    assert [turn.state for turn in found.turns] == ["", "s"]
    assert found.turns == [turn if not turn.state else found.turns[1] for turn in found.turns]
    check(found, PROMPT.token_ids, generate.asked)
    unnamed = [turn.observation for turn in link(PROMPT.token_ids, generate.asked)]
    assert unnamed == [[], [7, 8, 11]]


def test_answer_that_was_cut_off_gets_its_end_from_the_template() -> None:
    found, generate = play(twice, written(4, finish="length"), written(5, 10))
    assert generate.asked[1].context == [12, 1, 11, 4, 10, 7, 8, 11]
    assert found.turns[1].observation == [10, 7, 8, 11]  # the end is read, not trained
    check(found, PROMPT.token_ids, generate.asked)


def test_restart_begins_a_sample_in_a_context_of_its_own() -> None:
    async def script(chat: Chat) -> None:
        await chat.answer()
        chat.restart([{"role": "user", "content": "33"}])
        await chat.answer()
        chat.say("6")
        await chat.answer()

    found, generate = play(script, written(4, 10), written(5, 10), written(6, 10))
    assert [turn.begins for turn in found.turns] == [False, True, False]
    assert found.turns[1].observation == [12, 3, 3, 11]
    assert len(found.samples()) == 2
    check(found, PROMPT.token_ids, generate.asked)


def test_chat_of_its_own_messages_follows_no_prompt() -> None:
    async def script(chat: Chat) -> None:
        await chat.answer()

    found, generate = play(script, written(4, 10), messages=[{"role": "user", "content": "9"}], role="judge")
    assert [(turn.begins, turn.observation, turn.role) for turn in found.turns] == [(True, [12, 9, 11], "judge")]
    check(found, PROMPT.token_ids, generate.asked)


def test_rewards_of_turns_and_tokens_add_up() -> None:
    async def script(chat: Chat) -> None:
        await chat.answer()
        chat.reward(0.5)
        chat.reward(0.25, [1.0, 2.0])

    found, _ = play(script, written(4, 10))
    assert (found.turns[0].reward, found.turns[0].token_rewards, found.reward) == (0.75, [1.0, 2.0], None)
    assert found.total == 3.75


def test_chat_ends_where_an_answer_was_cut_off() -> None:
    async def script(chat: Chat) -> None:
        assert not chat.ended
        await chat.answer()
        assert chat.ended

    play(script, written(4, finish="length"))


@pytest.mark.parametrize("early", [True, False])
def test_one_side_cannot_speak_twice(early: bool) -> None:
    async def script(chat: Chat) -> None:
        if not early:
            await chat.answer()
            await chat.answer()
        chat.say("1")

    with pytest.raises(ValueError, match="not answered yet" if early else "no message was added"):
        play(script, written(4, 10))


def test_branch_continues_the_context_of_any_turn() -> None:
    async def main() -> None:
        generate = Talking([written(n, n, 10) for n in range(12)])
        chat = Chat.of(PROMPT, generate)
        await chat.answer()
        chat.say("7")
        await chat.answer()
        chat.restart([{"role": "user", "content": "33"}])
        await chat.answer()
        chat.say("6")
        await chat.answer()
        turns, contexts = list(chat.turns), [one.context for one in generate.asked]
        for place, context in enumerate(contexts):
            branch = chat.branch(place)
            await branch.answer()
            branch.say("8")
            await branch.answer()
            assert generate.asked[-2].context == context
            assert generate.asked[-1].context == [*context, *generate.asked[-2].completion.token_ids, 8, 11]
            assert [(turn.fork, turn.begins) for turn in branch.turns] == [(place - 1, True), (None, False)]
            check(Trajectory([*turns, *branch.turns]), PROMPT.token_ids, generate.asked)

    asyncio.run(main())
