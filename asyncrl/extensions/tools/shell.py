"""Shell tasks: files and an instruction, one command per turn, and tests at the end.

Keys of the question:
    messages    the instruction; HOW explains how to act
    files       {path: text}, or `folder`: a folder of the host whose files are copied
    checks      [{"command": "sh check.sh", "expect": "42"}, ...]: each passes when its command exits with 0 and prints
                what is expected, if anything is; the fraction that passes is the reward
    tests       {path: text} that the checks need: written after the last turn, so that the model cannot read them

The model is responsible for what it does to its sandbox: tests that cannot be written any more fail.
Files that it leaves can still act while checks run (such as a module that a test imports). What a check expects is
kept outside of the sandbox; an exit code is not.

waits for     the sandbox, which bounds every command
on a hang     EpisodeFailed("sandbox"), from the sandbox
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.envs.env import Question, Step
from asyncrl.extensions.tools.calls import known, malformed_calls, parse
from asyncrl.extensions.tools.output import shown
from asyncrl.extensions.tools.shared import LOCAL, check_sandboxes, sandboxes
from asyncrl.schema import Message

if TYPE_CHECKING:
    from asyncrl.extensions.sandbox.protocol import Sandbox

HOW = (
    "Work with shell commands: write one command, or several lines, in one ```bash block. It is run in the folder of "
    "the task, and you are shown its output. Each block begins in that folder; files stay, variables and processes do "
    "not. When all is done write DONE."
)
BASH: Message = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs commands in the folder of the task, and shows what they print. Write DONE at the end.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "one command, or several lines"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
"""Tool of a question whose commands come as tool calls: question["tools"] = [BASH]."""
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_DONE = re.compile(r"^\s*DONE\s*$", re.MULTILINE)
_ONE = "One block with commands at a time: nothing was run."


class ShellEnv:
    """One episode, with its own sandbox."""

    def __init__(
        self,
        *,
        sandbox: str = LOCAL,
        sandbox_params: Mapping[str, Any] | None = None,
        max_turns: int = 16,
        seconds: float | None = None,
        format: str | None = None,
        output_chars: int = 4000,
    ) -> None:
        """Configure the episode. For `sandbox` and its arguments see shared.sandboxes. `seconds` bounds one command
        (unset: the sandbox's limit). `format` is the call format (calls.parse) of the tool bash, whose calls are the
        commands; unset: code blocks. Raises ConfigError."""
        self._backend, self._max_turns, self._seconds = (sandbox, dict(sandbox_params or {})), max_turns, seconds
        self._format, self._output_chars = known(format, "format") if format else None, output_chars
        check_sandboxes(*self._backend, "sandbox")
        self._sandbox: Sandbox | None = None
        self._question: Question = {}
        self._turns = 0

    async def reset(self, question: Question) -> None:
        """Open a sandbox with the files of the question."""
        self._question, self._turns = question, 0
        self._sandbox = await sandboxes(*self._backend).open()
        files = dict(question.get("files", {}))
        if folder := question.get("folder"):
            files = await asyncio.to_thread(_read, Path(folder)) | files
        for path, content in files.items():
            await self._sandbox.write(path, content if isinstance(content, bytes) else content.encode())

    async def step(self, action: str) -> Step:
        """Run the command. The episode is done if there is none, if the model says so, or at the last turn."""
        self._turns += 1
        commands, wrong = self._commands(action)
        done = bool(_DONE.search(_BLOCK.sub("", action))) or not (commands or wrong) or self._turns >= self._max_turns
        told = [wrong] if wrong else [await self._run(command) for command in commands]
        if done:
            return Step(done=True, reward=await self.finish())
        role = {"role": "tool", "name": "bash"} if self._format else {"role": "user"}
        return Step([{**role, "content": text} for text in told])

    async def finish(self) -> float:
        """Return the fraction of the checks that pass."""
        sandbox, checks = self._opened(), self._question["checks"]
        tests: dict[str, str] = self._question.get("tests", {})
        try:
            for path, text in tests.items():
                await sandbox.write(path, text.encode())
        except (ValueError, OSError):  # the model put a link or a folder there, or filled the disk
            return 0.0
        return sum([await self._passes(check) for check in checks]) / len(checks)

    async def close(self) -> None:
        """Remove the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox:
            await sandbox.close()

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("call reset first")
        return self._sandbox

    def _commands(self, text: str) -> tuple[list[str], str]:
        """Return the turn's command, or none, and what is wrong with the turn."""
        if self._format is None:
            blocks = _BLOCK.findall(text)
            return (blocks, "") if len(blocks) < 2 else ([], _ONE)
        rest, calls = parse(text, self._format, before=self._turns)
        if wrong := malformed_calls(rest, self._format):
            return [], f"Error: {wrong[0]}"
        commands = [call.arguments.get("command") for call in calls if call.name == "bash"]
        if len(calls) > 1 or len(commands) < len(calls) or not all(isinstance(command, str) for command in commands):
            return [], 'Error: one call of bash at a time, with {"command": "..."}: nothing was run.'
        return [str(command) for command in commands], ""

    async def _run(self, command: str) -> str:
        try:
            words = ["bash", "-c", command.encode(errors="replace").decode()]
            outcome = await self._opened().run(words, seconds=self._seconds)
        except ValueError as error:
            return f"Error: {error}"
        return shown(outcome, self._output_chars)

    async def _passes(self, check: Mapping[str, str]) -> bool:
        outcome = await self._opened().run(["sh", "-c", check["command"]], seconds=self._seconds)
        expected = check.get("expect")
        return outcome.ok and (expected is None or outcome.stdout.decode(errors="replace").strip() == expected.strip())


def _read(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
