"""OpenAI's own clients against the proxy: an agent written with them has the trajectory that it has without them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from asyncrl.agents.chat import Chat
from asyncrl.agents.linking import check, link
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.schema import Completion, Trajectory
from tests.agents.talking import Talking, written
from tests.extensions.proxy.behind import CALLS, EOS_ID, PAIR, Says, template, user

TOOL: Any = {"type": "function", "function": {"name": "7", "strict": True, "parameters": {}}}
CALL = '<tool_call>{"name": "7", "arguments": {"a": 5}}</tool_call>'


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[AsyncOpenAI]:
    """Clients cost 20 ms to make; with_options lends its connections to each episode."""
    made = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none", max_retries=0)
    yield made
    runner.run(made.close())


# --- the same agent, with Chat and with the API -------------------------------------------------------------

Step = tuple[str, list[int], bool, bool]  # what is said, what is answered, whether to its end, and in a new chat

steps = st.lists(
    st.tuples(
        st.text("12", min_size=1, max_size=3),
        st.lists(st.sampled_from([1, 2, PAIR]), min_size=1, max_size=3),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def completions(script: Sequence[Step]) -> list[Completion]:
    return [written(*ids, EOS_ID) if ends else written(*ids, finish="length") for _, ids, ends, _ in script]


async def direct(script: Sequence[Step]) -> Trajectory:
    generate, chat = Talking(completions(script), template()), None
    for say, _, _, anew in script:
        if chat is None or anew:
            chat = Chat(generate, [user(say)])
        else:
            chat.say(say)
        await chat.answer()
    return Trajectory(link(generate.asked[0].context, generate.asked))


async def proxied(script: Sequence[Step], proxy: Proxy, shared: AsyncOpenAI, stream: bool) -> Trajectory:
    generate, history = Talking(completions(script), template()), list[Any]()
    async with proxy.session(generate) as session:
        client = shared.with_options(base_url=proxy.base_url, api_key=session.key)
        for say, _, _, anew in script:
            history = [user(say)] if anew else [*history, user(say)]
            if stream:
                pieces = [
                    piece
                    async for piece in await client.chat.completions.create(model="m", messages=history, stream=True)
                ]
                text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
                history.append({"role": "assistant", "content": text})
            else:
                answer = await client.chat.completions.create(model="m", messages=history)
                history.append(answer.choices[0].message)
    found = session.trajectory(generate.asked[0].context, None)
    check(found, generate.asked[0].context, generate.asked)
    return found


def test_proxied_agent_has_the_trajectory_of_the_direct_one(
    proxy: Proxy, runner: asyncio.Runner, shared: AsyncOpenAI
) -> None:
    @settings(max_examples=25)  # a call costs the client 5 ms
    @given(steps, st.booleans())
    def same(script: list[Step], stream: bool) -> None:
        assert runner.run(proxied(script, proxy, shared, stream)) == asyncio.run(direct(script))

    same()


# --- tools, texts, other clients ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_loop_of_tools_is_one_sample(proxy: Proxy, runner: asyncio.Runner, shared: AsyncOpenAI, stream: bool) -> None:
    async def ask(client: AsyncOpenAI, history: list[Any]) -> tuple[Any, str]:
        """The message as this client would send it back, and why it ended."""
        if not stream:
            answer = await client.chat.completions.create(model="m", messages=history, tools=[TOOL])
            return answer.choices[0].message, answer.choices[0].finish_reason
        async with client.chat.completions.stream(model="m", messages=history, tools=[TOOL]) as events:
            choice = (await events.get_final_completion()).choices[0]
            return choice.message.model_dump(exclude={"parsed"}), choice.finish_reason

    async def main() -> tuple[Trajectory, Talking]:
        generate = Talking([written(100, EOS_ID), written(4, EOS_ID)], Says(template(CALLS), CALL))
        async with proxy.session(generate) as session:
            client = shared.with_options(base_url=proxy.base_url, api_key=session.key)
            history: list[Any] = [user("1")]
            message, reason = await ask(client, history)
            assert reason == "tool_calls"
            (call,) = message["tool_calls"] if stream else [one.model_dump() for one in message.tool_calls]
            assert (call["function"]["name"], call["function"]["arguments"]) == ("7", '{"a": 5}')
            history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "6"}]
            message, reason = await ask(client, history)
            assert (message["content"] if stream else message.content, reason) == ("4", "stop")
        return session.trajectory(generate.asked[0].context, None), generate

    found, generate = runner.run(main())
    assert len(found.samples()) == 1
    assert generate.asked[1].context[: len(generate.asked[0].context) + 2] == [*generate.asked[0].context, 100, EOS_ID]


def test_choices_logprobs_and_tokens_are_those_of_the_engine(
    proxy: Proxy, runner: asyncio.Runner, shared: AsyncOpenAI
) -> None:
    async def main() -> None:
        generate = Talking([written(3, EOS_ID), written(4, EOS_ID), written(PAIR, 5)], template())
        async with proxy.session(generate) as session:
            client = shared.with_options(base_url=proxy.base_url, api_key=session.key)
            messages: Any = [user("1")]
            both = await client.chat.completions.create(
                model="m", messages=messages, n=2, logprobs=True, extra_body={"return_token_ids": True}
            )
            assert [one.message.content for one in both.choices] == ["3", "4"]
            told = both.model_dump()
            logprobs = told["choices"][1]["logprobs"]["content"]
            assert [(one["token"], one["logprob"]) for one in logprobs] == [("4", -0.125), ("", -0.25)]
            assert [one["token_ids"] for one in told["choices"]] == [[3, EOS_ID], [4, EOS_ID]]
            assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (3, 4)
            text = (await client.completions.create(model="m", prompt="12", logprobs=0)).model_dump()["choices"][0]
            assert (text["logprobs"]["tokens"], text["logprobs"]["text_offset"]) == (["12", "5"], [0, 2])

    runner.run(main())


def test_synchronous_client_in_a_thread(proxy: Proxy, runner: asyncio.Runner) -> None:
    def agent(key: str) -> list[str | None]:
        with OpenAI(base_url=proxy.base_url, api_key=key, max_retries=0) as client:
            history: list[Any] = [user("1")]
            for _ in range(2):
                answer = client.chat.completions.create(model="m", messages=history).choices[0].message
                history += [answer, user("2")]
            pieces = client.completions.create(model="m", prompt="12", stream=True)
            client.post("/reward", body={"reward": 0.5}, cast_to=object)
            return [history[1].content, history[3].content, "".join(piece.choices[0].text for piece in pieces)]

    async def main() -> None:
        generate = Talking([written(n, EOS_ID) for n in (3, 4, 5)], template())
        async with proxy.session(generate) as session:
            assert await asyncio.to_thread(agent, session.key) == ["3", "4", "5"]
        assert session.posted == 0.5
        assert len(session.trajectory(generate.asked[0].context, None).samples()) == 2

    runner.run(main())


def test_refusal_reaches_the_agent_as_openais_own_error(
    proxy: Proxy, runner: asyncio.Runner, shared: AsyncOpenAI
) -> None:
    async def main() -> None:
        messages: Any = [user("1")]
        async with proxy.session(Talking([], template())) as session:
            client = shared.with_options(base_url=proxy.base_url, api_key=session.key, max_retries=2)
            with pytest.raises(BadRequestError, match=r"top_p: got 0\.5\. Remove it") as refused:
                await client.chat.completions.create(model="m", messages=messages, top_p=0.5)
            assert refused.value.param == "top_p"
        with pytest.raises(APIStatusError, match="the episode of this API key has ended"):
            await client.chat.completions.create(model="m", messages=messages)

    runner.run(main())
