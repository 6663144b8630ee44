"""Every well-formed call is found, everything else stays in the text, and no text makes the parser raise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.calls import ToolCall, known, parse

ADD = '{"name": "add", "arguments": {"a": 1}}'
FORMATS = ("hermes", "llama3_json", "pythonic")


def names(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("text", "rest", "count"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", 1),
        (f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "I add.", 2),
        (f"<tool_call>[{ADD}, {ADD}]</tool_call>", "", 2),
        (f"so <tool_call>{ADD}", "so", 1),  # its end is a stop token, or was not written
        (f"<tool_call>{{</tool_call>x<tool_call>{ADD}</tool_call>", "<tool_call>{</tool_call>x", 1),
    ],
)
def test_hermes_calls_are_taken_out_of_the_text(text: str, rest: str, count: int) -> None:
    assert parse(text, "hermes")[0] == rest
    assert names(parse(text, "hermes")[1]) == [("add", {"a": 1})] * count


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "arguments": {"a": 1}}'),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}};{"name": "add", "parameters": {"a": 1}}',
        ),
        ("pythonic", "[add(a=1), add(a=1)]"),
    ],
)
def test_text_of_calls_alone_is_calls(format: str, text: str) -> None:
    rest, calls = parse(f" {text}\n", format)
    assert (rest, names(calls)) == ("", [("add", {"a": 1})] * 2)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "no call "),
        ("hermes", '<tool_call>{"name": "add", "arguments": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", f"<tool_call>[{ADD}, 7]</tool_call>"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
        ("llama3_json", f"see {ADD}"),
        ("llama3_json", f"{ADD} indeed"),
        ("llama3_json", "7"),
        ("llama3_json", ""),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[add(**x)]"),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", "[add(a=b())]"),
        ("pythonic", "[]"),
        ("pythonic", "add(a=1)"),
    ],
)
def test_what_is_no_call_stays_as_it_was_written(format: str, text: str) -> None:
    assert parse(text, format) == (text, [])


def test_calls_are_numbered_through_their_conversation() -> None:
    _, calls = parse(f"<tool_call>[{ADD}, {ADD}]</tool_call>", "hermes", before=3)
    assert [call.id for call in calls] == ["call00003", "call00004"]


@pytest.mark.parametrize("format", FORMATS)
@given(text=st.lists(st.sampled_from([*'<>{}[]();:,"=\\ a1', "<tool_call>", "</tool_call>", ADD, "\x00", "\ud800"])))
def test_no_text_makes_it_raise_and_calls_are_json(format: str, text: list[str]) -> None:
    rest, calls = parse("".join(text), format)
    assert calls or rest == "".join(text)
    for call in calls:
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments


def test_unknown_format_is_refused_by_name() -> None:
    assert known("hermes", "agent_params.tools") == "hermes"
    with pytest.raises(
        ConfigError, match=r"agent_params.tools: got 'xml'. Must be one of hermes, llama3_json, pythonic."
    ):
        known("xml", "agent_params.tools")
