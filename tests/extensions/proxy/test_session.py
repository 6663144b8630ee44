"""Token in, token out, whatever a client does to its history: what an engine wrote is never tokenised anew."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.linking import check
from asyncrl.errors import EngineError, EpisodeFailed
from asyncrl.extensions.proxy.answers import ApiResponse
from asyncrl.extensions.proxy.messages import ApiError, read
from asyncrl.extensions.proxy.session import ProxySession
from asyncrl.schema import Completion, Exchange, Message, Trajectory
from tests.agents.talking import Talking, written
from tests.extensions.proxy.behind import (
    ASKS,
    BOS_ID,
    CALLS,
    EOS_ID,
    PAIR,
    Raising,
    Says,
    assistant,
    session,
    soon,
    template,
    user,
)

ADD = {"type": "function", "function": {"name": "7", "parameters": {}}}


def said(answer: ApiResponse) -> Message:
    """Return a message as a client sees it."""
    return json.loads(answer.whole("chat", template()))["choices"][0]["message"]


def test_written_tokens_stand_unchanged_in_the_next_context() -> None:
    """ "12" would be tokenised to one token; the model wrote two, and once more wrote one."""

    async def main() -> None:
        generate = Talking([written(1, 2, EOS_ID), written(PAIR, EOS_ID), written(3, EOS_ID)], template())
        async with session(generate) as behind:
            history = [user("12")]
            for say in ("4", "5", "6"):
                history += [said(await behind.chat({"messages": history})), user(say)]
        first = [BOS_ID, PAIR, ASKS]
        second = [*first, 1, 2, EOS_ID, 4, ASKS]
        third = [*second, PAIR, EOS_ID, 5, ASKS]
        assert [one.context for one in generate.asked] == [first, second, third]
        found = behind.trajectory(first, None)
        assert [turn.observation for turn in found.turns] == [[], [4, ASKS], [5, ASKS]]
        check(found, first, generate.asked)

    asyncio.run(main())


def test_end_that_was_not_written_is_read_before_what_follows() -> None:
    async def main() -> None:
        generate = Talking([written(1, 2, finish="length"), written(3, EOS_ID)], template())
        async with session(generate) as behind:
            answer = said(await behind.chat({"messages": [user("1")], "max_tokens": 2}))
            await behind.chat({"messages": [user("1"), answer, user("5")]})
        assert generate.asked[1].context == [BOS_ID, 1, ASKS, 1, 2, EOS_ID, 5, ASKS]
        assert generate.limits == [2, None]

    asyncio.run(main())


@pytest.mark.parametrize(
    "edited",
    [
        [user("1"), assistant("1 2"), user("5")],
        [user("2"), assistant("12"), user("5")],
        [user("0"), user("1"), assistant("12"), user("5")],
        [user("1"), assistant("12", name="x"), user("5")],
        [assistant("12"), user("5")],
    ],
)
def test_edited_history_begins_a_context_and_a_sample(edited: list[Message]) -> None:
    async def main() -> None:
        generate = Talking([written(1, 2, EOS_ID), written(3, EOS_ID)], template())
        async with session(generate) as behind:
            await behind.chat({"messages": [user("1")]})
            await behind.chat({"messages": edited})
        assert generate.asked[1].context == template().begin([{"content": "", **message} for message in edited])
        assert (behind._figures.turns, behind._figures.contexts_begun) == (2, 2)
        found = behind.trajectory([BOS_ID, 1, ASKS], 1.0)
        assert [turn.begins for turn in found.turns] == [False, True]
        check(found, [BOS_ID, 1, ASKS], generate.asked)

    asyncio.run(main())


def test_branch_goes_on_from_the_answer_that_it_shares() -> None:
    async def main() -> None:
        generate = Talking([written(n, EOS_ID) for n in (3, 4, 5)], template())
        async with session(generate) as behind:
            history = [user("1")]
            history.append(said(await behind.chat({"messages": history})))
            for say in ("8", "9"):
                await behind.chat({"messages": [*history, user(say)]})
        shared = [BOS_ID, 1, ASKS, 3, EOS_ID]
        assert [one.context for one in generate.asked[1:]] == [[*shared, 8, ASKS], [*shared, 9, ASKS]]
        assert behind._figures.contexts_begun == 1
        assert [turn.begins for turn in behind.trajectory([BOS_ID, 1, ASKS], 0.0).turns] == [False, False, True]

    asyncio.run(main())


def test_chat_that_ends_with_its_answer_goes_on_behind_it() -> None:
    async def main() -> None:
        generate = Talking([written(3, EOS_ID), written(4, EOS_ID)], template())
        async with session(generate) as behind:
            answer = said(await behind.chat({"messages": [user("1")]}))
            await behind.chat({"messages": [user("1"), answer]})
        assert generate.asked[1].context == [BOS_ID, 1, ASKS, 3, EOS_ID, ASKS]

    asyncio.run(main())


# --- histories edited at random -----------------------------------------------------------------------------


def spelled(message: Message, way: int) -> Message:
    """The same, as another client would write it."""
    content = message["content"]
    if way == 1:
        return {**message, "content": [{"type": "text", "text": content}]}
    if way == 2:
        return {**message, "refusal": None, "tool_calls": [], "content": content or None}
    return message


def edited(history: list[Message], draw: random.Random) -> list[Message]:
    """Return the messages, unchanged in most cases."""
    at = draw.randrange(len(history))
    match draw.randrange(10):
        case 0:
            return history[:at] + history[at + 1 :]
        case 1:
            return [*history[:at], {**history[at], "content": history[at]["content"] + "1"}, *history[at + 1 :]]
        case 2:
            return history[: at + 1]
        case 3:
            return [*history[:at], assistant("12"), *history[at:]]
        case 4:
            return [user("12")]
    return history


def expected(sent: Sequence[Message], before: Sequence[tuple[list[Message], Exchange]]) -> tuple[bool, list[int]]:
    """Return the context that the rule gives: the longest earlier chat that it starts with, the later of equals."""
    keys = [read(message).key for message in sent]
    rendered = [read(message).rendered for message in sent]
    best: tuple[int, Exchange] | None = None
    for chat, asked in before:
        own = [read(message).key for message in chat]
        if keys[: len(own)] == own and (best is None or len(own) >= best[0]):
            best = len(own), asked
    if best is None:
        return False, template().begin(rendered)
    length, asked = best
    rest = template().extend(rendered[length:], last=asked.completion.token_ids[-1])
    return True, [*asked.context, *asked.completion.token_ids, *rest]


answers = st.lists(
    st.tuples(st.lists(st.sampled_from([1, 2, PAIR]), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=7
)


@given(answers, st.randoms(use_true_random=False))
def test_kept_history_is_kept_by_token_and_others_begin_anew(
    script: list[tuple[list[int], bool]], draw: random.Random
) -> None:
    completions = [written(*ids, EOS_ID) if ends else written(*ids, finish="length") for ids, ends in script]

    async def main() -> None:
        generate, before = Talking(completions, template()), list[tuple[list[Message], Exchange]]()
        async with session(generate) as behind:
            history, begun = [user("12")], 0
            for _ in completions:
                sent = edited(history, draw) or [user("2")]
                body = {"messages": [spelled(message, draw.randrange(3)) for message in sent]}
                goes_on, wanted = expected(sent, before)
                begun += not goes_on
                history = [*sent, said(await behind.chat(body))]
                assert generate.asked[-1].context == wanted
                before.append((history, generate.asked[-1]))
                history = [*history, user(draw.choice(["1", "2", "12"]))]
        prompt = generate.asked[0].context
        check(behind.trajectory(prompt, None), prompt, generate.asked)
        assert behind._figures.contexts_begun == begun

    asyncio.run(main())


# --- tools --------------------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "7", "arguments": {"a": 5}}</tool_call>'


def test_calls_of_tools_are_told_and_found_again_in_the_history() -> None:
    async def main() -> tuple[list[Message], Talking, ProxySession]:
        generate = Talking(
            [written(100, EOS_ID), written(101, EOS_ID), written(4, EOS_ID)], Says(template(CALLS), CALL, f"so {CALL}")
        )
        async with session(generate) as behind:
            history: list[Message] = [user("1")]
            for _ in range(2):
                answer = await behind.chat({"messages": history, "tools": [ADD], "tool_choice": "auto"})
                assert answer.choices[0].finish_reason == "tool_calls"
                history += [said(answer), {"role": "tool", "tool_call_id": "x", "content": "6"}]
            await behind.chat({"messages": history, "tools": [ADD]})
            return history, generate, behind

    history, generate, behind = asyncio.run(main())
    calls = [history[n]["tool_calls"][0] for n in (1, 3)]
    assert [call["id"] for call in calls] == ["call00000", "call00001"]
    assert calls[0]["function"] == {"name": "7", "arguments": '{"a": 5}'}
    assert [history[n]["content"] for n in (1, 3)] == [None, "so"]
    first = [BOS_ID, 7, 15, 1, ASKS]
    assert [one.context for one in generate.asked] == [
        first,
        [*first, 100, EOS_ID, 6, ASKS],
        [*first, 100, EOS_ID, 6, ASKS, 101, EOS_ID, 6, ASKS],
    ]
    assert behind._figures.contexts_begun == 1


def test_history_under_other_tools_begins_anew() -> None:
    async def main() -> None:
        generate = Talking([written(100, EOS_ID), written(4, EOS_ID)], Says(template(CALLS), CALL))
        async with session(generate) as behind:
            first = said(await behind.chat({"messages": [user("1")], "tools": [ADD]}))
            await behind.chat({"messages": [user("1"), first, user("6")]})
        assert generate.asked[1].context == [BOS_ID, 1, ASKS, 5, EOS_ID, 6, ASKS]

    asyncio.run(main())


@pytest.mark.parametrize("body", [{}, {"tools": [ADD], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_call_is_text(body: dict[str, Any]) -> None:
    async def main() -> ApiResponse:
        async with session(Talking([written(100, EOS_ID)], Says(template(), CALL))) as behind:
            return await behind.chat({"messages": [user("1")], **body})

    answer = asyncio.run(main())
    assert (said(answer)["content"], answer.choices[0].finish_reason) == (CALL, "stop")


# --- texts, choices, rewards --------------------------------------------------------------------------------


def test_text_goes_on_from_the_tokens_of_its_beginning() -> None:
    async def main() -> None:
        generate = Talking(
            [written(1, 2, EOS_ID), written(3, EOS_ID), written(4, EOS_ID), written(5, EOS_ID)], template()
        )
        async with session(generate) as behind:
            text = "12="
            for more in ("12", "6", ""):
                answer = json.loads((await behind.complete({"prompt": text})).whole("text", template()))
                text += answer["choices"][0]["text"] + more
            await behind.complete({"prompt": ["1"]})
        first = [PAIR, ASKS]
        second = [*first, 1, 2, EOS_ID, PAIR]
        third = [*second, 3, EOS_ID, 6]
        assert [one.context for one in generate.asked] == [first, second, third, [1]]
        assert behind._figures.contexts_begun == 2

    asyncio.run(main())


def test_text_begins_as_the_tokenizer_begins_and_goes_on_without() -> None:
    async def main() -> None:
        generate = Talking([written(4, 10), written(5, 10)])  # whose template puts 12 before a text
        async with session(generate) as behind:
            await behind.complete({"prompt": "1"})
            await behind.complete({"prompt": "142"})
        assert [one.context for one in generate.asked] == [[12, 1], [12, 1, 4, 10, 2]]

    asyncio.run(main())


def test_token_ids_are_read_as_they_are() -> None:
    async def main() -> None:
        generate = Talking([written(1, 2, EOS_ID), written(3, EOS_ID), written(4, EOS_ID)], template())
        async with session(generate) as behind:
            answer = await behind.complete({"prompt": [1, 2], "return_token_ids": True})
            told = json.loads(answer.whole("text", template()))
            ids = told["prompt_token_ids"] + told["choices"][0]["token_ids"]
            await behind.complete({"prompt": [[*ids, 9]]})
            await behind.complete({"prompt": [7]})
        assert [one.context for one in generate.asked] == [[1, 2], [1, 2, 1, 2, EOS_ID, 9], [7]]
        assert behind._figures.contexts_begun == 2

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [-1], [1.5], [True], {"a": 1}, [[]], [None]])
def test_prompt_that_is_not_one_is_refused(prompt: Any) -> None:
    async def main() -> None:
        async with session(Talking([], template())) as behind:
            with pytest.raises(ApiError, match="prompt: got"):
                await behind.complete({"prompt": prompt})

    asyncio.run(main())


def test_several_choices_are_answers_of_their_own() -> None:
    async def main() -> None:
        generate = Talking([written(n, EOS_ID) for n in (3, 4, 5, 7)], template())
        async with session(generate) as behind:
            answer = await behind.chat({"messages": [user("1")], "n": 2})
            assert [choice.turn for choice in answer.choices] == [0, 1]
            await behind.chat({"messages": [user("1"), answer.choices[1].message, user("6")], "n": 2})
        assert [one.context for one in generate.asked[2:]] == [[BOS_ID, 1, ASKS, 4, EOS_ID, 6, ASKS]] * 2
        assert (behind._figures.turns, behind._figures.contexts_begun) == (4, 3)  # of each further choice, one
        found = behind.trajectory([BOS_ID, 1, ASKS], 0.0)
        assert [len(sample) for sample in found.samples()] == [1, 2, 1]
        check(found, [BOS_ID, 1, ASKS], generate.asked)

    asyncio.run(main())


def test_trajectory_has_asking_order_turns_answering_order() -> None:
    class SecondFirst(Talking):
        """Its first answer waits for its second."""

        async def __call__(self, token_ids: list[int], **options: Any) -> Completion:
            answer = await super().__call__(token_ids, **options)
            if len(self.asked) == 1:
                await soon(second)
            else:
                second.set()
            return answer

    second = asyncio.Event()

    async def main() -> Trajectory:
        async with session(SecondFirst([written(3, EOS_ID), written(4, EOS_ID)], template())) as behind:
            asking = [behind.chat({"messages": [user(say)]}) for say in ("1", "2")]
            told = [answer.choices[0].turn for answer in await asyncio.gather(*asking)]
            assert told == [1, 0]
            behind.take_reward({"reward": 5, "turn": 1})
            return behind.trajectory([BOS_ID, 1, ASKS], None)

    found = asyncio.run(main())
    assert [(turn.completion.token_ids[0], turn.begins, turn.reward) for turn in found.turns] == [
        (3, False, 5.0),
        (4, True, 0.0),
    ]


def test_rewards_are_given_to_the_answers_that_they_name() -> None:
    """Answers 0 and 2 are one chat, 1 is another: the trajectory has them in another order."""

    async def main() -> Trajectory:
        generate = Talking([written(3, EOS_ID), written(4, EOS_ID), written(3, EOS_ID)], template())
        async with session(generate) as behind:
            answer = said(await behind.chat({"messages": [user("1")]}))
            await behind.chat({"messages": [user("2")]})
            await behind.chat({"messages": [user("1"), answer, user("6")]})
            for turn, reward in ((1, 9.0), (1, 1), (2, 2.0)):
                behind.take_reward({"reward": reward, "turn": turn})
            behind.take_reward({"turn": 0, "token_rewards": [0.5, 0]})
            behind.take_reward({"reward": -1})
            return behind.trajectory([BOS_ID, 1, ASKS], behind.posted)

    found = asyncio.run(main())
    given_to = [(turn.completion.token_ids[0], turn.reward, turn.token_rewards) for turn in found.turns]
    assert given_to == [(3, 0.0, [0.5, 0.0]), (3, 2.0, []), (4, 1.0, [])]
    assert found.reward == -1.0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": "1"},
        {"reward": True},
        {"reward": 1, "turn": 1},
        {"reward": 1, "turn": -1},
        {"reward": 1, "turn": True},
        {"reward": 1, "token_rewards": [1, 2]},
        {"turn": 0, "token_rewards": [1]},
        {"turn": 0, "token_rewards": [1, "2"]},
        {"turn": 0, "token_rewards": 7},
        {"reward": 1, "step": 0},
    ],
)
def test_reward_of_nothing_is_refused(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with session(Talking([written(3, EOS_ID)], template())) as behind:
            await behind.chat({"messages": [user("1")]})
            with pytest.raises(ApiError) as refused:
                behind.take_reward(body)
            assert refused.value.status == 400
            assert behind.trajectory([], behind.posted).total == 0.0

    asyncio.run(main())


# --- where it goes wrong ------------------------------------------------------------------------------------


def test_full_context_answers_empty_and_then_refuses() -> None:
    async def main() -> None:
        empty, answer = written(finish="length"), written(3, EOS_ID)
        async with session(Talking([answer, empty, answer, empty, empty], template())) as behind:
            body = {"messages": [user("1")]}
            for reason in ("stop", "length", "stop", "length"):
                assert (await behind.chat(body)).choices[0].finish_reason == reason
            with pytest.raises(ApiError) as refused:
                await behind.chat(body)
        assert refused.value.body()["error"]["code"] == "context_length_exceeded"
        assert len(behind.trajectory([], None).turns) == 4

    asyncio.run(main())


def test_what_the_template_cannot_say_is_refused() -> None:
    async def main() -> None:
        raising = template("{{ raise_exception('roles must alternate') }}")
        async with session(Talking([], raising)) as behind:
            with pytest.raises(ApiError, match="rejects these messages: roles must alternate"):
                await behind.chat({"messages": [user("1")]})

    asyncio.run(main())


def test_fleet_error_ends_the_block_whatever_is_made_of_it() -> None:
    async def main(n: int) -> None:
        async with session(Raising(EngineError("all engines are gone"))) as behind:
            with pytest.raises(ApiError) as refused:
                await behind.chat({"messages": [user("1")], "n": n})
            assert refused.value.status == 503

    async def waits() -> None:
        async with session(Raising(EngineError("all engines are gone"))) as behind:
            with pytest.raises(ApiError):
                await behind.chat({"messages": [user("1")]})
            await asyncio.Event().wait()  # the program has not noticed

    async def raises() -> None:
        async with session(Raising(EngineError("all engines are gone"))) as behind:
            await behind.chat({"messages": [user("1")]})

    for failing in (main(1), main(2), waits(), raises()):
        with pytest.raises(EngineError, match="all engines are gone"):
            asyncio.run(failing)


def test_cancelled_block_is_cancelled_despite_a_fleet_error() -> None:
    async def main() -> None:
        async def block() -> None:
            async with session(Raising(EngineError("gone"))) as behind:
                with pytest.raises(ApiError):
                    await behind.chat({"messages": [user("1")]})
                task.cancel()
                await asyncio.sleep(0)

        task = asyncio.create_task(block())
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_episode_that_asked_for_nothing_is_the_agents_fault() -> None:
    async def main() -> None:
        async with session(Talking([], template())) as behind:
            pass
        with pytest.raises(EpisodeFailed, match="agent_error: it made no request to the model"):
            behind.trajectory([], 1.0)

    asyncio.run(main())
