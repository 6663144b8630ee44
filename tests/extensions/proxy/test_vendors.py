"""Other routes and fields by the vendors' own clients: responses, messages, forced calls, stop strings, thoughts."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from asyncrl.agents.linking import check
from asyncrl.engine.stop_strings import StopStrings
from asyncrl.errors import EngineError
from asyncrl.extensions.proxy import messages_api, parsing, responses_api
from asyncrl.extensions.proxy.messages import ApiError, without_thoughts
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.images import images_in
from asyncrl.models.tiny import CHAT_TEMPLATE
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.schema import Trajectory
from tests.agents.talking import Talking, written
from tests.extensions.proxy.behind import ASKS, CALLS, EOS_ID, Raising, Says, template, user
from tests.extensions.proxy.behind import session as bare_session
from tests.fakes import FakeEngine, echo

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOJSON = "{% for message in messages %}{{ message | tojson }}{% endfor %}="
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ADD}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>'
BAD = '<tool_call>{"name": "add", "arguments": {"a": 5,}}</tool_call>'


def says(*texts: str, chat_template: str = CALLS) -> Talking:
    """Return an engine that answers with these texts, each a token of its own."""
    answers = [written(100 + number, EOS_ID) for number in range(len(texts))]
    return Talking(answers, Says(template(chat_template), *texts))


def on(proxy: Proxy, runner: asyncio.Runner, generate: Talking, act: Callable[[str, str], Any]) -> Any:
    """Let an agent act in an episode of its own, and check what would be trained."""

    async def main() -> tuple[Any, Any]:
        async with proxy.session(generate) as session:
            found = await act(proxy.base_url, session.key)
        return found, session.trajectory(generate.asked[0].context, None)

    found, played = runner.run(main())
    check(played, generate.asked[0].context, generate.asked)
    return found, played


# --- OpenAI's responses -------------------------------------------------------------------------------------


FUNCTION: Any = {"type": "function", "name": "add", "parameters": ADD, "strict": False}


def more_tools(*tools: Any) -> Any:
    """Return the item by which Codex sends the tools of its default models."""
    return {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [*tools]}


def namespace(name: str, *tools: Any) -> Any:
    return {"type": "namespace", "name": name, "description": f"Tools of {name}.", "tools": [*tools]}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai 2.6 does not know namespaces yet
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "item", "shown", "own"),
    [
        ([FUNCTION], [], "add", None),
        ([namespace("mcp__sums", FUNCTION)], [], "mcp__sums__add", "mcp__sums"),
        ([], [more_tools(namespace("mcp__sums", FUNCTION), namespace("none"))], "mcp__sums__add", "mcp__sums"),
        ([FUNCTION], [more_tools(namespace("a", FUNCTION)), more_tools(namespace("a", FUNCTION))], "a__add", "a"),
        ([], [more_tools(namespace("functions", FUNCTION))], "add", "functions"),
        ([], [more_tools(FUNCTION)], "add", None),
    ],
)
def test_loop_of_tools_over_responses_is_one_sample(
    proxy: Proxy, runner: asyncio.Runner, stream: bool, tools: list[Any], item: list[Any], shown: str, own: str | None
) -> None:
    """Codex looks a call up by both names, so it gets them as it sent them."""

    async def agent(base_url: str, key: str) -> list[Any]:
        said = []
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            history: list[Any] = [*item, {"role": "user", "content": [{"type": "input_text", "text": "1"}]}]
            for _ in range(2):
                asked: Any = {"model": "m", "input": history, "tools": tools, "instructions": "2", "store": False}
                asked["extra_body"] = {"client_metadata": {"turn_id": "1"}}  # Codex sends it
                if stream:
                    async with client.responses.stream(**asked) as events:
                        answer = await events.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                assert answer.status == "completed"
                history += [item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in answer.output]
                for one in answer.output:
                    if one.type == "function_call":
                        told = {"type": "function_call_output", "call_id": one.call_id, "output": "6"}
                        history.append(told)
                        said.append((one.name, getattr(one, "namespace", None), json.loads(one.arguments)))
                said.append(answer.output_text)
        return said

    generate = says("well" + CALL.replace("add", shown), "6")
    found, played = on(proxy, runner, generate, agent)
    assert found == [("add", own, {"a": 5}), "well", "6"]
    assert len(played.samples()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("written", "text"), [({"input": "a\nb"}, "a\nb"), ({"patch": 1}, '{"patch": 1}')])
def test_custom_tool_is_to_the_model_a_function_of_one_text(
    proxy: Proxy, runner: asyncio.Runner, stream: bool, written: Any, text: str
) -> None:
    """Codex' apply_patch is one. A call without that text gets to the tool, which says what is wrong."""
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": form}

    async def agent(base_url: str, key: str) -> list[Any]:
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            history: list[Any] = [user("1")]
            for _ in range(2):
                asked: Any = {"model": "m", "input": history, "tools": [patch], "store": False}
                if stream:
                    async with client.responses.stream(**asked) as events:
                        answer = await events.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                history += [item.model_dump() for item in answer.output]
                if answer.output[-1].type == "custom_tool_call":
                    call = answer.output[-1]
                    history.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "6"})
            return [(call.name, call.input), answer.output_text]

    call = json.dumps({"name": "apply_patch", "arguments": written})
    found, played = on(proxy, runner, says(f"<tool_call>{call}</tool_call>", "6"), agent)
    assert found == [("apply_patch", text), "6"]
    assert len(played.samples()) == (1 if text == written.get("input") else 2)
    (function,) = responses_api.as_chat({"input": "1", "tools": [patch]})["tools"]
    assert function["function"]["description"] == "Patch.\n\nstart: /a/"
    assert function["function"]["parameters"]["required"] == ["input"]


def test_provider_tools_and_duplicates_are_refused_by_name(proxy: Proxy, runner: asyncio.Runner) -> None:
    shell = {"type": "local_shell", "description": "x" * 300, "name": "shell"}
    other = {**FUNCTION, "parameters": {}}

    async def main() -> None:
        async with (
            proxy.session(says()) as session,
            AsyncOpenAI(base_url=proxy.base_url, api_key=session.key, max_retries=0) as client,
        ):
            for tools, problem in (
                ([more_tools(namespace("functions", shell))], "'local_shell', 'name': 'shell'.*Turn it off"),
                ([more_tools({"type": "tool_search"})], "'tool_search'.*Turn it off"),
                ([more_tools(namespace("a", namespace("b", FUNCTION)))], "'namespace', 'name': 'b'"),
                ([more_tools(namespace("a", FUNCTION)), more_tools(namespace("a", other))], "a__add.*Two tools"),
                ([more_tools({"name": "add"})], "tools: got {'name': 'add'}"),
            ):
                given: Any = [*tools, user("1")]
                with pytest.raises(BadRequestError, match=problem):
                    await client.responses.create(model="m", input=given)

    runner.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "computer_call"}]),
        ("tools", 5),
        ("text", {"format": {"type": "json_object"}}),
        ("text", {"format": "json"}),
        ("input", [{"role": "user", "content": [{"type": []}]}]),
        ("top_p", 0.5),
    ],
)
def test_what_a_response_cannot_have_is_refused(proxy: Proxy, runner: asyncio.Runner, field: str, value: Any) -> None:
    async def main() -> None:
        async with (
            proxy.session(says()) as session,
            AsyncOpenAI(base_url=proxy.base_url, api_key=session.key, max_retries=0) as client,
        ):
            asked: Any = {"model": "m", "input": "1", field: value}
            with pytest.raises(BadRequestError, match=field):
                await client.responses.create(**asked)

    runner.run(main())


# --- Anthropic's messages -----------------------------------------------------------------------------------


def claude(base_url: str, key: str, retries: int = 0) -> Any:
    """Return Anthropic's client. It is imported here, because every process of the tests collects this file, and the
    import takes three seconds."""
    import anthropic

    return anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=retries)


@pytest.mark.parametrize("stream", [False, True])
def test_loop_of_tools_over_messages_is_one_sample(proxy: Proxy, runner: asyncio.Runner, stream: bool) -> None:
    tool: Any = {"name": "add", "input_schema": ADD}

    async def agent(base_url: str, key: str) -> list[Any]:
        said = []
        async with claude(base_url, key) as client:
            history: list[Any] = [user("1")]
            for _ in range(2):
                system: Any = [{"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}}]
                asked: Any = {"model": "m", "max_tokens": 9, "messages": history, "tools": [tool], "system": system}
                asked["output_config"] = {"effort": "high"}  # Claude Code sends it
                if stream:
                    async with client.messages.stream(**asked) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(**asked)
                history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
                said.append(answer.stop_reason)
                for block in answer.content:
                    if block.type == "tool_use":
                        told = {"type": "tool_result", "tool_use_id": block.id, "content": "6"}
                        history.append({"role": "user", "content": [told]})
                        said.append((block.name, block.input))
                    elif block.type == "text":
                        said.append(block.text)
        return said

    generate = says(f"well{CALL}", "6")
    found, played = on(proxy, runner, generate, agent)
    assert found == ["tool_use", "well", ("add", {"a": 5}), "end_turn", "6"]
    assert len(played.samples()) == 1


def test_refusals_and_ends_are_those_that_its_client_knows(proxy: Proxy, runner: asyncio.Runner) -> None:
    import anthropic

    async def agent(base_url: str, key: str) -> None:
        async with claude(base_url, key) as client:
            asked: Any = {"model": "m", "max_tokens": 9, "messages": [user("1")]}
            answer = await client.messages.create(**asked, stop_sequences=["Obs"])
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Obs")
            with pytest.raises(anthropic.BadRequestError, match="top_p"):
                await client.messages.create(**asked, extra_body={"top_p": 0.5})
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await client.messages.create(**asked, tool_choice={"type": "any"})
            form = {"format": {"type": "json_schema", "schema": {}}}
            for field, value in (("tool_choice", {"type": []}), ("tools", 5), ("output_config", form)):
                with pytest.raises(anthropic.BadRequestError, match=field):
                    await client.messages.create(**asked, extra_body={field: value})
        async with claude(base_url, "x") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)

    on(proxy, runner, says("7Obs"), agent)


def test_tokens_are_counted_as_a_request_would_read_them(proxy: Proxy, runner: asyncio.Runner) -> None:
    """Also where a conversation goes on from the tokens that the engine wrote."""
    import anthropic

    async def agent(base_url: str, key: str) -> None:
        history: list[Any] = [user("1")]
        more: Any = {"model": "m", "system": "2", "tools": [{"name": "add", "input_schema": ADD}]}
        async with claude(base_url, key) as client:
            for _ in range(2):
                counted = await client.messages.count_tokens(messages=history, **more)
                answer = await client.messages.create(max_tokens=9, messages=history, **more)
                assert counted.input_tokens == answer.usage.input_tokens
                history += [{"role": "assistant", "content": answer.content}, user("4")]
            with pytest.raises(anthropic.BadRequestError, match="messages"):
                await client.messages.count_tokens(messages=[], model="m")

    on(proxy, runner, says("7", "6"), agent)


# --- errors -------------------------------------------------------------------------------------------------


async def by_chat(base_url: str, key: str, retries: int, **more: Any) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=retries) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}], **more)


async def by_responses(base_url: str, key: str, retries: int, **more: Any) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=retries) as client:
        await client.responses.create(model="m", input="1", **more)


async def by_messages(base_url: str, key: str, retries: int, **more: Any) -> None:
    async with claude(base_url, key, retries) as client:
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "1"}], **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ask", "sdk"), [(by_chat, "openai"), (by_responses, "openai"), (by_messages, "anthropic")])
def test_errors_are_those_of_clients_and_not_retried(
    proxy: Proxy, runner: asyncio.Runner, ask: Callable[..., Any], sdk: str, stream: bool
) -> None:
    """Clients would wait for seconds, and ask the engines of an episode that has ended."""
    errors = importlib.import_module(sdk)

    async def main() -> None:
        more: dict[str, Any] = {"stream": True} if stream else {}
        async with proxy.session(says()) as session:
            with pytest.raises(errors.BadRequestError, match=r"top_p: got 0\.5\. Remove it"):
                await ask(proxy.base_url, session.key, 2, extra_body={"top_p": 0.5}, **more)
            with pytest.raises(errors.NotFoundError, match="Not Found"):
                await ask(f"{proxy.base_url}/nothing/v1", session.key, 2, **more)
            with pytest.raises(errors.AuthenticationError, match="does not know this API key"):
                await ask(proxy.base_url, "x", 2, **more)
        with pytest.raises(errors.APIStatusError, match="has ended") as gone:
            await ask(proxy.base_url, session.key, 2, **more)
        assert gone.value.status_code == 410
        asking: list[asyncio.Task[None]] = []
        with pytest.raises(EngineError, match="no engine is left"):
            await failing(asking, more)
        with pytest.raises(errors.InternalServerError, match="the engines cannot answer") as failed:
            await asking[0]
        assert failed.value.status_code == 503

    async def failing(asking: list[asyncio.Task[None]], more: dict[str, Any]) -> None:
        async with proxy.session(Raising(EngineError("no engine is left"))) as session:
            asking.append(asyncio.create_task(ask(proxy.base_url, session.key, 2, **more)))
            await asyncio.wait(asking)

    runner.run(main())


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("status", [429, 503])
def test_overloaded_engine_is_asked_again_while_agents_wait(
    proxy: Proxy, runner: asyncio.Runner, ask: Callable[..., Any], status: int
) -> None:
    busy = [True, False]

    def answer(request: dict[str, Any]) -> bytes | httpx.Response:
        return httpx.Response(status) if busy.pop(0) else echo()(request)

    async def main() -> None:
        client = FakeEngine(answer).client(retry_timeout=60.0)
        episode = Episode(client.generate(1.0), EpisodeTimeouts(60.0, 60.0, None), template())
        async with proxy.session(episode) as session:
            await ask(proxy.base_url, session.key, 0)
        await client.close()
        assert busy == []

    runner.run(main())


IMAGE = {"type": "base64", "media_type": "image/png", "data": "x"}
USES = {"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 5}}
RESULT = {"type": "tool_result", "tool_use_id": "call00000", "content": [{"type": "text", "text": "6"}]}
CHAT_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
BODIES: dict[Any, Any] = {
    None: {
        "messages": [user("1"), {"role": "assistant", "content": "7", "tool_calls": [CHAT_CALL]}],
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stop": ["Obs"],
    },
    responses_api: {
        "instructions": "1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "3"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "3"}]},
            {"type": "function_call", "call_id": "call00000", "name": "add", "arguments": '{"a": 5}'},
            {"type": "function_call_output", "call_id": "call00000", "output": "6"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": ADD}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
    },
    messages_api: {
        "system": [{"type": "text", "text": "1"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "3"}, USES]},
            {"role": "user", "content": [RESULT, {"type": "image", "source": IMAGE}]},
        ],
        "tools": [{"name": "add", "input_schema": ADD}],
        "tool_choice": {"type": "tool", "name": "add"},
    },
}
JUNK: list[Any] = [None, 5, "x", "", [], {}, [5], [[]], {"type": []}, {"type": "text"}, [{"type": "text", "text": 5}]]


def spoiled(value: Any) -> Iterator[Any]:
    """Yield a body with something else in place of each part of it."""
    yield from JUNK
    if isinstance(value, dict | list):
        for place, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            for other in spoiled(inner):
                changed: Any = value.copy()
                changed[place] = other
                yield changed


@pytest.mark.parametrize("api", BODIES, ids=["chat", "responses", "messages"])
def test_body_of_any_form_is_answered_or_refused(api: Any) -> None:
    """A bug ends the run."""

    class ReadsImages(Talking):
        async def images(self, chat: Any) -> list[bytes]:
            return [b"x" for _ in images_in(chat)]

    async def main() -> tuple[int, int]:
        answered, refused = 0, 0
        forever = itertools.repeat(written(3, EOS_ID))
        async with bare_session(ReadsImages(forever, template(TOJSON))) as behind:
            for body in filter(lambda body: isinstance(body, dict), spoiled(BODIES[api])):
                try:
                    chat = api.as_chat(body) if api else body
                    answer = await behind.chat(chat)
                    told = api.whole(answer, body) if api else answer.whole("chat", behind.template)
                    answered += bool(told)
                except ApiError as error:
                    refused += error.status == 400
        return answered, refused

    answered, refused = asyncio.run(main())
    assert answered > 50
    assert refused > 50


# --- fields of chats ----------------------------------------------------------------------------------------


async def ask(base_url: str, key: str, messages: list[Any], **more: Any) -> Any:
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        return (await client.chat.completions.create(model="m", messages=messages, **more)).choices[0]


@pytest.mark.parametrize(
    ("choice", "rest"),
    [
        ("required", 'add", "arguments": {"a": 5}}</tool_call>'),
        ({"type": "function", "function": {"name": "add"}}, '{"a": 5}}</tool_call>'),
    ],
)
def test_forced_call_begins_in_the_context(proxy: Proxy, runner: asyncio.Runner, choice: Any, rest: str) -> None:
    async def agent(base_url: str, key: str) -> Any:
        history = [user("1")]
        first = await ask(base_url, key, history, tools=[CHAT_TOOL], tool_choice=choice)
        history += [first.message, {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "6"}]
        await ask(base_url, key, history, tools=[CHAT_TOOL])
        return first

    generate = says(rest, "6")
    found, played = on(proxy, runner, generate, agent)
    (call,) = found.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments), found.finish_reason) == (
        "add",
        {"a": 5},
        "tool_calls",
    )
    begun = parsing.forced(choice, [CHAT_TOOL], "hermes")
    assert generate.asked[0].context[-len(template().encode(begun)) :] == template().encode(begun)
    assert len(played.samples()) == 1, "the next request continues these tokens"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}, "maybe", {"x": 1}])
def test_call_that_cannot_be_forced_is_refused(proxy: Proxy, runner: asyncio.Runner, choice: Any) -> None:
    async def main() -> None:
        async with proxy.session(says()) as session:
            tools = {} if choice == "required" else {"tools": [CHAT_TOOL]}
            with pytest.raises(BadRequestError, match="tool_choice"):
                await ask(proxy.base_url, session.key, [user("1")], tool_choice=choice, **tools)

    runner.run(main())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_sglang_format_calls_cannot_be_forced_with_a_reason(choice: Any) -> None:
    with pytest.raises(ApiError, match=r"tool_choice: got .*how calls of sglang:glm45 begin is not known") as refused:
        parsing.forced(choice, [CHAT_TOOL], "sglang:glm45")
    assert refused.value.status == 400
    assert parsing.forced("auto", [CHAT_TOOL], "sglang:glm45") == ""


@pytest.mark.parametrize(("written", "samples"), [("7Obs", 1), ("7Obs 8", 2)])
def test_stop_string_cuts_and_the_turn_goes_on_there(
    proxy: Proxy, runner: asyncio.Runner, written: str, samples: int
) -> None:
    """What the client has not read is no context of its next request."""

    async def agent(base_url: str, key: str) -> Any:
        first = await ask(base_url, key, [user("1")], stop=["never", "Obs"])
        await ask(base_url, key, [user("1"), first.message, user("2")])
        return first

    generate = says(written, "6")
    found, played = on(proxy, runner, generate, agent)
    assert (found.message.content, found.finish_reason) == ("7", "stop")
    assert len(played.samples()) == samples
    assert generate.stops == [["never", "Obs"], []], "engines end the answer there, too"


@pytest.mark.parametrize(("follows", "samples"), [("348", 1), ("8", 2), ("", 2)])
def test_text_goes_on_from_its_stop_string_or_anew(
    proxy: Proxy, runner: asyncio.Runner, follows: str, samples: int
) -> None:
    """What the engine wrote stands in a context once: neither twice, nor where the client's text does not have it."""

    async def agent(base_url: str, key: str) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            first = (await client.completions.create(model="m", prompt="1", stop="34")).choices[0]
            await client.completions.create(model="m", prompt=f"1{first.text}{follows}")
            return first

    generate = says("734", "6", chat_template=CHAT_TEMPLATE)
    found, played = on(proxy, runner, generate, agent)
    assert (found.text, found.finish_reason) == ("7", "stop")
    assert len(played.samples()) == samples
    text = "".join(generate.template.decode([token]) for token in generate.asked[1].context)
    assert text == f"17{follows}"


def test_stop_string_of_an_agent_ends_the_answer_of_an_engine(proxy: Proxy, runner: asyncio.Runner) -> None:
    """The tokens behind it, which were on their way, are counted, and are not in the trajectory."""
    engine = FakeEngine(echo(6))

    async def main() -> Trajectory:
        client = engine.client(stop=StopStrings([], template().spell))
        episode = Episode(client.generate(1.0), EpisodeTimeouts(60.0, 60.0, None), template())
        async with proxy.session(episode) as session:
            first = await ask(proxy.base_url, session.key, [user("1")], stop="23")
            assert (first.message.content, first.finish_reason) == ("01", "stop")
            await ask(proxy.base_url, session.key, [user("1"), first.message, user("5")])
        assert client.inflight.tokens["training"] == 12
        await client.close()
        return session.trajectory(template().begin([user("1")]), None)

    found = runner.run(main())
    assert [turn.completion.token_ids for turn in found.turns] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert found.turns[0].completion.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert len(found.samples()) == 1


THINKS = "<think>\nlet me add\n</think>\n\n7"
Heard = tuple[str, str]


async def chat_heard(base_url: str, key: str, stream: bool) -> Heard:
    """Return the thoughts and the text of an answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        asked: Any = {"model": "m", "messages": [user("1")]}
        if not stream:
            said = (await client.chat.completions.create(**asked)).choices[0].message.model_dump()
            return said["reasoning_content"], said["content"]
        pieces = [piece.choices[0].delta async for piece in await client.chat.completions.create(**asked, stream=True)]
        thought = "".join(piece.model_dump().get("reasoning_content") or "" for piece in pieces)
        return thought, "".join(piece.content or "" for piece in pieces)


async def responses_heard(base_url: str, key: str, stream: bool) -> Heard:
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        asked: Any = {"model": "m", "input": "1", "store": False}
        if not stream:
            answer = await client.responses.create(**asked)
            thoughts = [item.content[0].text for item in answer.output if item.type == "reasoning" and item.content]
            return "".join(thoughts), answer.output_text
        heard = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
        async for event in await client.responses.create(**asked, stream=True):
            if event.type in heard:
                heard[event.type] += event.model_dump()["delta"]
        thought, text = heard.values()
        return thought, text


async def messages_heard(base_url: str, key: str, stream: bool) -> Heard:
    async with claude(base_url, key) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [user("1")]}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if stream:
            async with client.messages.stream(**asked) as events:
                heard = [(event.type, event) async for event in events if event.type in ("thinking", "text")]
            thought = "".join(event.thinking for kind, event in heard if kind == "thinking")
            return thought, "".join(event.text for kind, event in heard if kind == "text")
        blocks = [block.model_dump() for block in (await client.messages.create(**asked)).content]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        return blocks[0]["thinking"], blocks[1]["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hear", [chat_heard, responses_heard, messages_heard])
def test_thoughts_are_told_apart_in_every_api(
    runner: asyncio.Runner, hear: Callable[[str, str, bool], Any], stream: bool
) -> None:
    async def main() -> Heard:
        proxy = Proxy(reasoning=True)
        async with proxy.session(says(THINKS)) as session:
            heard: Heard = await hear(proxy.base_url, session.key, stream)
        await proxy.close()
        return heard

    assert runner.run(main()) == ("let me add", "7")


THINKING = "{% for message in messages %}{{ message.reasoning_content }}{{ message.content }}{% endfor %}="


@pytest.mark.parametrize(
    ("api", "history"),
    [
        (
            responses_api,
            {
                "input": [
                    {"role": "user", "content": "1"},
                    {
                        "type": "reasoning",
                        "id": "r",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "34"}],
                    },
                    {"role": "assistant", "content": "5"},
                    {"role": "user", "content": "6"},
                ]
            },
        ),
        (
            messages_api,
            {
                "messages": [
                    user("1"),
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "34", "signature": ""},
                            {"type": "text", "text": "5"},
                        ],
                    },
                    user("6"),
                ]
            },
        ),
    ],
)
def test_returned_thoughts_reach_the_template_at_a_context(api: Any, history: dict[str, Any]) -> None:
    async def main() -> list[int]:
        generate = Talking([written(3, EOS_ID)], template(THINKING))
        async with bare_session(generate) as behind:
            await behind.chat(api.as_chat(history))
        return generate.asked[0].context

    assert asyncio.run(main()) == [1, 3, 4, 5, 6, ASKS]


def test_thoughts_are_told_apart_and_may_be_left_out(runner: asyncio.Runner) -> None:
    async def main() -> None:
        proxy = Proxy(reasoning=True)
        generate = says(THINKS + CALL, "6")
        async with proxy.session(generate) as session:
            first = await ask(proxy.base_url, session.key, [user("1")], tools=[CHAT_TOOL])
            said = first.message.model_dump(exclude_none=True)
            assert (said.pop("reasoning_content"), said["content"]) == ("let me add", "7")
            told = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "6"}
            await ask(proxy.base_url, session.key, [user("1"), said, told], tools=[CHAT_TOOL])
        assert len(session.trajectory(generate.asked[0].context, None).samples()) == 1
        await proxy.close()

    runner.run(main())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", ("", "7")),
        ("<think>a</think>7", ("a", "7")),
        ("a\n</think>\n\n7", ("a", "7")),  # the template has opened it
        ("<think>\nand so on", ("and so on", "")),
    ],
)
def test_thoughts_stand_at_the_beginning(text: str, found: tuple[str, str]) -> None:
    assert without_thoughts(text) == found


def test_malformed_call_stays_in_the_text_and_is_said_to_be_so(proxy: Proxy, runner: asyncio.Runner) -> None:
    before = proxy.figures.malformed
    found, _ = on(proxy, runner, says(BAD), lambda url, key: ask(url, key, [user("1")], tools=[CHAT_TOOL]))
    assert found.message.content == BAD
    (told,) = found.malformed_tool_calls
    assert "The call is not JSON" in told
    assert proxy.figures.malformed == before + 1


# --- SGLang's detectors -------------------------------------------------------------------------------------

GLM = "well<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


QWEN = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
READ = {"glm45": (GLM, "well"), "deepseekv3": (DEEPSEEK, ""), "qwen25": (f"well{QWEN}", "well")}
DROPPED = [
    ("qwen25", QWEN.replace("5}", "5,}")),
    ("qwen25", QWEN.replace("add", "sub")),
    ("glm45", GLM.removesuffix("\n</tool_call>")),
]
PROGRAM = """
import dataclasses, json, sys
from asyncrl.errors import ConfigError
from asyncrl.extensions.proxy import parsing

asked = json.loads(sys.argv[1])
told = [dataclasses.asdict(parsing.parse(text, f"sglang:{name}", asked["tools"])) for name, text in asked["cases"]]
try:
    parsing.load("sglang:none")
except ConfigError as error:
    told.append(str(error))
print(json.dumps(told))
"""


def test_sglang_reads_calls_and_dropped_text_stays() -> None:
    """In a process of its own: SGLang changes the one that imports it."""
    cases = [(name, text) for name, (text, _) in READ.items()] + DROPPED + [("glm45", "plain")]
    asked = json.dumps({"tools": [CHAT_TOOL], "cases": cases})
    done = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *told, refused = json.loads(done.stdout.splitlines()[-1])
    call = {"name": "add", "arguments": {"a": 5}, "id": "call00000"}
    for (_, rest), one in zip(READ.values(), told, strict=False):
        assert one == {"text": rest, "calls": [call], "malformed": []}
    for (_, text), one in zip(DROPPED, told[len(READ) :], strict=False):
        assert (one["text"], one["calls"], len(one["malformed"])) == (text, [], 1)
    assert told[-1] == {"text": "plain", "calls": [], "malformed": []}
    assert "agent_params.tool_format: got 'sglang:none'" in refused
    assert "glm45" in refused
