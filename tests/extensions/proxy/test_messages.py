"""Messages that say the same have one key, however they are spelled; what says something else has another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.extensions.proxy.messages import ApiError, assistant, read, read_all, tools_key
from asyncrl.extensions.tools.calls import ToolCall

CALL = ToolCall("add", {"a": 1, "b": ["é"]}, "call00000")
SAID = assistant("", [CALL])


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call00000", "function": {"name": "add", "arguments": arguments}} | more],
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"content": [{"type": "text", "text": "a"}], "role": "user"}),
        ({"role": "user", "content": "a\nb"}, {"role": "user", "content": ["a", {"type": "text", "text": "b"}]}),
        (
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        ),
        (SAID, called('{ "b": ["\\u00e9"], "a": 1 }', type="function")),
        (SAID, called({"a": 1, "b": ["é"]}, index=0)),
        (called("{}"), called("")),
        (called("{}"), called(None)),
    ],
)
def test_same_message_has_the_same_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert read(one).key == read(other).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        (SAID, called({"a": 2, "b": ["é"]})),
        (SAID, {**SAID, "content": "so"}),
        (SAID, called({"a": 1, "b": ["é"]}, id="call00001")),
        (called("{}"), called("{")),
        ({"role": "tool", "tool_call_id": "x", "content": "1"}, {"role": "tool", "tool_call_id": "y", "content": "1"}),
    ],
)
def test_another_message_has_another_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert read(one).key != read(other).key


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[" * 900 + "]" * 900, "[" * 65 + "]" * 65])
def test_arguments_that_are_no_json_or_too_deep_stay_text(text: str) -> None:
    assert read(called(text)).rendered["tool_calls"][0]["function"]["arguments"] == text


def test_templates_get_texts_and_values() -> None:
    rendered = read(json.loads(json.dumps(SAID))).rendered
    assert rendered["content"] == ""
    assert rendered["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": ["é"]}}
    assert read(SAID).calls == 1


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "a",
        ["a"],
        [{"content": "a"}],
        [{"role": 1}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}],
        [{"role": "user", "content": {"type": "text"}}],
        [{"role": "assistant", "tool_calls": 7}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [7]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}],
    ],
)
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(ApiError) as refused:
        read_all(messages)
    assert refused.value.status == 400
    assert refused.value.body()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("tools", [7, {}, [7], [{}], [{"function": {}}]])
def test_what_is_no_list_of_tools_is_refused(tools: Any) -> None:
    with pytest.raises(ApiError, match="tools: got"):
        tools_key(tools)
