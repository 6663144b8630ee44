"""A model whose template says nothing of tools reads of them in the system message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.agents.template import ChatTemplate
from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.calls import parse
from asyncrl.extensions.tools.system import ignores_tools, tools_in_system
from asyncrl.models.catalog import resolve
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.rollout.prompts import Prompts
from tests.fakes import FakeTemplate, tiny_config

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "1+1?"}


def test_system_message_is_put_first_or_goes_on() -> None:
    (made, user) = tools_in_system([USER], TOOLS)
    assert (made["role"], user) == ("system", USER)
    assert json.dumps(TOOLS[0]["function"]) in made["content"]
    given = {"role": "system", "content": "Be brief."}
    (extended, _) = tools_in_system([given, USER], TOOLS)
    assert extended["content"] == f"Be brief.\n\n{made['content']}"
    assert given["content"] == "Be brief."
    assert tools_in_system([USER], []) == [USER]


@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}'),
        ("pythonic", "[add(a=1)]"),
    ],
)
def test_form_that_it_asks_for_is_the_form_that_is_parsed(format: str, call: str) -> None:
    text = tools_in_system([USER], TOOLS, format)[0]["content"]
    shown = call.replace('"add"', "<function-name>").replace('{"a": 1}', "<arguments-object>")
    assert shown in text or format == "pythonic"
    assert [one.arguments for one in parse(call, format)[1]] == [{"a": 1}]


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, pythonic"):
        tools_in_system([USER], TOOLS, "xml")


class Shows(FakeTemplate):
    def begin(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return [*super().begin(messages), len(tools)]


def test_template_ignoring_tools_is_told_from_one_that_shows() -> None:
    assert ignores_tools(FakeTemplate(), TOOLS)
    assert not ignores_tools(FakeTemplate(), [])
    assert not ignores_tools(Shows(), TOOLS)


def test_unshown_tools_are_in_the_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]

    class Plain(ChatTemplate):
        shows = False

        def begin(self, messages: Any, tools: Any = ()) -> list[int]:
            return [len(str(one["content"])) for one in messages] + [99] * (self.shows * len(tools))

    class WithTools:
        size, inline = None, True

        def question(self, index: int) -> dict[str, Any]:
            asked = {"role": "user", "content": str(index)}
            return {"messages": [asked], "tools": tools, "tool_format": "pythonic"}

    tokenizer = load_tokenizer(resolve("builtin:tiny"), None)
    config = tiny_config(**{"eval.questions": 0})
    for shows in (False, True):
        template = Plain(tokenizer)
        template.shows = shows
        prompts = Prompts(config, {"copy3": WithTools()}, template, 64)  # type: ignore[dict-item]
        prompt = next(prompts.training["copy3"])
        (*system, user) = prompt.question["messages"]
        assert user["role"] == "user"
        assert len(prompt.token_ids) == 2
        if shows:
            assert (system, prompt.token_ids[-1]) == ([], 99)
        else:
            assert "[function_name(argument=value)" in system[0]["content"]
            assert prompt.token_ids[0] == len(system[0]["content"])
