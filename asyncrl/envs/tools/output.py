"""What a model is shown of an output: bounded, and in characters that every tokenizer takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.envs.sandbox.protocol import Outcome

TRACEBACK_LINES = 20
ENDED = {
    "timeout": "it ran out of time",
    "cpu": "it used too much processor time",
    "memory": "it used too much memory",
    "processes": "it started too many processes",
    "disk": "it filled the disk",
    "output": "it printed too much",
    "killed": "it was killed",
}
"""Why a program was ended, by Outcome.reason."""


def shown(outcome: Outcome, most: int) -> str:
    """What a program printed and how it ended: the beginning and the end of its stdout, at most so many characters, and
    the last lines of its stderr, at most as many."""
    lines = outcome.stderr.decode(errors="replace").splitlines()
    errors = "\n".join(lines[-TRACEBACK_LINES:])
    parts = [middle_out(outcome.stdout.decode(errors="replace").rstrip("\n"), most), errors[-most:]]
    if outcome.reason != "exited":
        parts.append(f"[{ENDED[outcome.reason]}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"


def middle_out(text: str, most: int) -> str:
    """At most so many characters: the middle is left out."""
    if len(text) <= most:
        return text
    head = most - most // 2
    return f"{text[:head]}\n[{len(text) - most} characters are left out]\n{text[len(text) - most // 2 :]}"


def cut(text: str, most: int) -> str:
    """At most so many characters, and what was left out; what no UTF-8 holds is replaced."""
    left_out = len(text) - most
    text = text[:most].encode(errors="replace").decode()
    return f"{text}\n[{left_out} more characters are left out]" if left_out > 0 else text
