"""Environments whose tools are given by specification (specs.py), and the tools' descriptions for models.

environment          ToolboxEnv([{"use": "python"}, {"use": "mcp", "command": [...]}], max_calls=8)
question["tools"]    functions(specs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.envs.env import Question
from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.env import ToolEnv
from asyncrl.extensions.tools.specs import source
from asyncrl.extensions.tools.tool import function
from asyncrl.schema import Message
from asyncrl.user_code import check_arguments

Spec = Mapping[str, Any]


class ToolboxEnv(ToolEnv):
    """ToolEnv whose tools are given by specification. An instance plays one episode, and shares with others what can be
    shared."""

    def __init__(self, tools: Sequence[Spec], **options: Any) -> None:
        """Configure the episode. `options` are ToolEnv's. Raises ConfigError; starts nothing."""
        check_arguments(ToolEnv, options, "tool_options", "An environment with tools", [])
        super().__init__([], **options)
        self._sources = [source(spec, f"tools.{place}") for place, spec in enumerate(tools)]

    async def reset(self, question: Question) -> None:
        """Open the tools of this episode. Raises EpisodeFailed if a server does not start."""
        made = [await one.episode(f"tools.{place}") for place, one in enumerate(self._sources)]
        self._take([tool for tools in made for tool in tools])
        await super().reset(question)


def functions(specs: Sequence[Spec], field: str = "tools") -> list[Message]:
    """Return the tools' descriptions for models in the OpenAI API's form; an MCP server is started and asked, once per
    process. Raises ConfigError, also for two tools of the same name."""
    places = [(f"{field}.{place}", spec) for place, spec in enumerate(specs)]
    found = [function(tool) for place, spec in places for tool in source(spec, place).listed(place)]
    names = [one["function"]["name"] for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(field, twice, "Several tools have this name: use `only` of an MCP server to leave some out.")
    return found
