"""What a tool is, and whose fault it is when a call comes to nothing.

the policy's            JSON that is none, an unknown tool, arguments that its schema does not allow, and what the tool
                        itself reports (REPORTED): told to the model, which may try again
the infrastructure's    whatever else a tool raises, and its time limit: EpisodeFailed("tool", ...), never a reward; or
                        told to the model too, where the tool says so (on_fault)
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from asyncrl.schema import Message

Schema = dict[str, Any]
"""JSON schema (draft 2020-12), as a tool call's arguments have it: {"type": "object", "properties": ...}."""
OnFault = Literal["episode", "model"]


class ToolError(Exception):
    """What a tool reports of a call: its text is told to the model."""


REPORTED = (ToolError, ValueError, ArithmeticError, LookupError)
"""What a call raises that its arguments have brought about."""


class Tool(Protocol):
    """One function that the model can call.

    It may also have: `open()` and `close()`, awaited when an episode begins and ends; `timeout`, seconds for one call
    (else the environment's; math.inf: it keeps its own); `on_fault`, "model" where the model is told even of a crash
    and of a timeout (else the environment's).
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """For the model."""
        ...

    @property
    def parameters(self) -> Schema: ...

    async def call(self, arguments: dict[str, Any]) -> str:
        """Run it with arguments that the schema allows. Raises one of REPORTED, or anything else for a fault."""
        ...


def function(tool: Tool) -> Message:
    """A tool as chat templates and the OpenAI API have it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
