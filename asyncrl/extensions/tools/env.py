"""Environment of an episode with tools: runs the calls in the model's text and returns their results.

waits for     every call, up to its time limit
on a hang     EpisodeFailed("tool"), or a message to the model (tool.py says which fault is whose)
its reward    none: a turn without a call ends the episode, and the task's own reward function scores it
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl.envs.env import Question, Step
from asyncrl.errors import EpisodeFailed, raised_by
from asyncrl.extensions.children.processes import WorkerPool, describe
from asyncrl.extensions.tools import schemas
from asyncrl.extensions.tools.calls import MOST_NESTED, ToolCall, known, malformed_calls, nested_too_deep, parse
from asyncrl.extensions.tools.output import cut
from asyncrl.extensions.tools.shared import shared
from asyncrl.extensions.tools.tool import REPORTED, OnFault, Tool, ToolOutput
from asyncrl.observability.intervals import TOOL, spent
from asyncrl.schema import Message

CHECKERS = 2
"""Number of processes that check arguments against schemas whose check can take long."""
CHECK_SECONDS = 60.0
"""Wall-clock limit of such a check, which a busy machine needs; its limit of CPU time is schemas.CPU_SECONDS."""


class ToolEnv:
    """Environment of one episode."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_calls: int = 32,
        format: str = "hermes",
        parallel: bool = True,
        call_timeout: float = 30.0,
        on_fault: OnFault = "episode",
        output_chars: int = 8000,
        penalty: float = 0.0,
        images: bool = False,
    ) -> None:
        """Configure the episode. It may have at most `max_calls` calls, malformed ones included; the calls of a turn
        run concurrently unless `parallel` is false. `format` is one of calls.parse. `call_timeout` is the time limit of
        one call in seconds. Every output is cut to `output_chars` characters. With `images`, the model sees the images
        that tools return; otherwise it is told that they are there. `penalty` is subtracted from a turn's
        reward for each call that is malformed, names an unknown tool, or has wrong arguments."""
        self.format, self._parallel, self._max_calls = known(format, "tool_options.format"), parallel, max_calls
        self._timeout, self._on_fault, self._output_chars, self._penalty = call_timeout, on_fault, output_chars, penalty
        self._images = images
        self._count, self._wrong = 0, 0
        self._take(tools)

    def _take(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"several tools have the same name: {sorted(tool.name for tool in tools)}")

    async def reset(self, question: Question) -> None:
        """Open the tools that need it."""
        self._count = 0
        for tool in self._tools.values():
            await _do(tool, "open")

    async def close(self) -> None:
        """Close every tool, and then raise the first error."""
        closed = await asyncio.gather(*(_do(tool, "close") for tool in self._tools.values()), return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error

    async def step(self, action: str) -> Step:
        """Run the turn's calls. The episode is done if there are none, or if the calls were used up before."""
        text, calls = parse(action, self.format, before=self._count)
        wrong = malformed_calls(text, self.format)
        left = self._max_calls - self._count
        if not (calls or wrong) or left <= 0:
            return Step(done=True, score=True)
        self._count += len(calls) + len(wrong)
        self._wrong = len(wrong)
        told = await self._run(calls[:left])
        told += [
            _message(call, f"Error: not run: the {self._max_calls} calls that there are have been used up.")
            for call in calls[left:]
        ]
        told += [{"role": "tool", "content": f"Error: {cut(slip, self._output_chars)}"} for slip in wrong]
        return Step(told, reward=0.0 - self._penalty * self._wrong, score=True, info={"calls": len(calls)})

    async def _run(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the messages that answer the calls. Raises EpisodeFailed, after which no other call runs."""
        if not self._parallel:
            return [_message(call, await self._answer(call)) for call in calls]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(call)) for call in calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        return [_message(call, answer.result()) for call, answer in zip(calls, answers, strict=True)]

    async def _answer(self, call: ToolCall) -> ToolOutput:
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(sorted(self._tools))
            return self._refuse(f"there is no tool {call.name!r}; there are: {names}.")
        if wrong := await _mismatch(call.arguments, tool):
            return self._refuse(wrong)
        try:
            return self._shown(await self._call(tool, call.arguments))
        except EpisodeFailed as failed:
            if isinstance(failed.__cause__, REPORTED):
                return cut(f"Error: {_reported(failed.__cause__)}", self._output_chars)
            if failed.reason == "tool" and (getattr(tool, "on_fault", None) or self._on_fault) == "model":
                return cut(f"Error: {failed.detail}", self._output_chars)
            raise

    def _shown(self, output: ToolOutput) -> ToolOutput:
        """Return an output as the model reads it. The images of a message with text are parts of their own."""
        if isinstance(output, str):
            return cut(output, self._output_chars)
        seen = [part for part in output if part["type"] == "image"] if self._images else []
        texts = [part.get("text", "[image, which cannot be shown]") for part in output]
        if not seen:
            return cut("\n".join(texts), self._output_chars)
        text = "\n".join(part["text"] for part in output if "text" in part)
        return [*seen, *([{"type": "text", "text": cut(text, self._output_chars)}] if text else [])]

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> ToolOutput:
        seconds = getattr(tool, "timeout", None) or self._timeout
        try:
            with spent(TOOL, tool.name):
                async with asyncio.timeout(seconds):
                    with raised_by("tool"):
                        found = await tool.call(arguments)
        except TimeoutError:
            raise EpisodeFailed("tool", f"{tool.name} did not answer within {seconds:g} s") from None
        except EpisodeFailed as failed:
            if failed.reason != "tool":
                raise
            detail = f"{tool.name}: {failed.detail}"
            raise EpisodeFailed("tool", detail, retry=failed.retry, where=failed.where) from failed.__cause__
        if not isinstance(found, str | list):
            raise EpisodeFailed("tool", f"{tool.name} returned {type(found).__name__} instead of a text or parts")
        return found

    def _refuse(self, why: str) -> str:
        self._wrong += 1
        return cut(f"Error: {why}", self._output_chars)


async def _mismatch(arguments: dict[str, Any], tool: Tool) -> str:
    """Return how the arguments violate the tool's schema; empty if they do not. Raises EpisodeFailed for a schema that
    cannot be used."""
    if nested_too_deep(arguments):
        return f"the arguments are nested more than {MOST_NESTED} deep."
    if schemas.is_linear(tool.parameters):
        found = schemas.check(arguments, tool.parameters)
    else:
        pool = shared("schemas", None, lambda: WorkerPool([sys.executable, "-P", "-m", schemas.__name__], CHECKERS))
        request = {"json": json.dumps({"arguments": arguments, "schema": tool.parameters})}  # of any number, any text
        reply = await pool.ask(request, "wrong", CHECK_SECONDS)
        if reply.late:
            raise EpisodeFailed("tool", f"the arguments of {tool.name} were not checked within {CHECK_SECONDS:g} s")
        if reply.exit_code == -signal.SIGPROF:
            return f"checking the arguments took more than {schemas.CPU_SECONDS:g} s of CPU time: shorten them."
        if reply.exit_code is not None:
            raise EpisodeFailed("tool", f"the process that checks arguments {describe(reply.exit_code)}")
        found = reply.messages[-1]
    if found["schema"]:
        raise EpisodeFailed("tool", f"the schema of {tool.name} cannot be used: {found['schema']}", retry=False)
    wrong: str = found["wrong"]
    return wrong and f"{wrong}. The schema is {json.dumps(tool.parameters, ensure_ascii=False)}"


def _message(call: ToolCall, content: ToolOutput) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _reported(error: BaseException) -> str:
    kind = "" if type(error).__name__ == "ToolError" else f"{type(error).__name__}: "
    return f"{kind}{error}"


async def _do(tool: Tool, method: str) -> None:
    if act := getattr(tool, method, None):
        done = act()
        if inspect.isawaitable(done):
            await done
