"""Environments with tools by specification (specs.py), and what models are told of these.

environment          toolbox([{"use": "python"}, {"use": "mcp", "command": [...]}], max_calls=8)
question["tools"]    functions(specs)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.envs.env import Question
from asyncrl.envs.tools.env import ToolEnv
from asyncrl.envs.tools.specs import source
from asyncrl.envs.tools.tool import function
from asyncrl.errors import ConfigError
from asyncrl.schema import Message

Spec = Mapping[str, Any]


class ToolboxEnv(ToolEnv):
    """A ToolEnv whose tools come by specification: an instance plays one episode, and shares with others what they can
    share."""

    def __init__(self, tools: Sequence[Spec], **options: Any) -> None:
        """`options` are ToolEnv's. Raises ConfigError; nothing is started."""
        try:
            inspect.signature(ToolEnv).bind([], **options)
        except TypeError as error:
            raise ConfigError(
                "tool_options", options, f"An environment with tools does not take them: {error}."
            ) from None
        super().__init__([], **options)
        self._sources = [source(spec, f"tools.{place}") for place, spec in enumerate(tools)]

    async def reset(self, question: Question) -> None:
        """Takes the tools for this episode. Raises EpisodeFailed when a server does not come up."""
        made = [await one.episode(f"tools.{place}") for place, one in enumerate(self._sources)]
        self._take([tool for tools in made for tool in tools])
        await super().reset(question)


def toolbox(specs: Sequence[Spec], **options: Any) -> Callable[[], ToolboxEnv]:
    """Makes environments with these tools. Raises ConfigError."""
    ToolboxEnv(specs, **options)
    return lambda: ToolboxEnv(specs, **options)


def functions(specs: Sequence[Spec], field: str = "tools") -> list[Message]:
    """What models are told of the tools, as the OpenAI API has it; an MCP server is started and asked, once in a
    process. Raises ConfigError, for two tools of one name too."""
    places = [(f"{field}.{place}", spec) for place, spec in enumerate(specs)]
    found = [function(tool) for place, spec in places for tool in source(spec, place).listed(place)]
    names = [one["function"]["name"] for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(field, twice, "Several tools have this name: an MCP server's `only` leaves some out.")
    return found
