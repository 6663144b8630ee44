"""The tool interface, and the attribution of failed calls.

the policy's            invalid JSON, an unknown tool, arguments that violate the schema, and what the tool
                        itself reports (REPORTED): reported to the model, which may try again
the infrastructure's    whatever else a tool raises, and its time limit: EpisodeFailed("tool", ...), never a reward; or
                        reported to the model too, if the tool says so (on_fault)
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from asyncrl.schema import Message

Schema = dict[str, Any]
"""JSON schema (draft 2020-12) of a tool call's arguments: {"type": "object", "properties": ...}."""
ToolOutput = str | list[Message]
"""What a call returns: a text, or the parts of a message, of type text or image (asyncrl/images.py)."""
OnFault = Literal["episode", "model"]


class ToolError(Exception):
    """Error that a tool reports for a call; the model reads its text."""


REPORTED = (ToolError, ValueError, ArithmeticError, LookupError)
"""Exceptions of a call that its arguments have caused."""


class Tool(Protocol):
    """One function that the model can call.

    It may also have: `open()` and `close()`, awaited when an episode begins and ends; `timeout`, in seconds for one
    call (default: the environment's; math.inf: it has its own); `on_fault`, "model" if even crashes and timeouts are
    reported to the model (default: the environment's).
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """Description for the model."""
        ...

    @property
    def parameters(self) -> Schema: ...

    async def call(self, arguments: dict[str, Any]) -> ToolOutput:
        """Run the tool with arguments that the schema allows. Raises one of REPORTED, or anything else for a fault."""
        ...


def function(tool: Tool) -> Message:
    """Return a tool in the form of chat templates and the OpenAI API."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
