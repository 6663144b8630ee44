"""Limits on the output that a model sees: a bounded length, and only characters that every tokenizer accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.extensions.sandbox.protocol import Outcome

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
"""Explanation of why a program was stopped, by Outcome.reason."""


def shown(outcome: Outcome, most: int) -> str:
    """Return what a program printed and how it ended: the beginning and end of its stdout, at most `most` characters,
    and the last lines of its stderr, at most as many."""
    lines = outcome.stderr.decode(errors="replace").splitlines()
    errors = "\n".join(lines[-TRACEBACK_LINES:])
    parts = [middle_out(outcome.stdout.decode(errors="replace").rstrip("\n"), most), errors[-most:]]
    if outcome.reason != "exited":
        parts.append(f"[{ENDED[outcome.reason]}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"


def middle_out(text: str, most: int) -> str:
    """Shorten the text to `most` characters by leaving out the middle."""
    if len(text) <= most:
        return text
    head = most - most // 2
    return f"{text[:head]}\n[{len(text) - most} characters are left out]\n{text[len(text) - most // 2 :]}"


def cut(text: str, most: int) -> str:
    """Return at most `most` characters, and the number left out. Characters that UTF-8 cannot encode are replaced."""
    left_out = len(text) - most
    text = text[:most].encode(errors="replace").decode()
    return f"{text}\n[{left_out} more characters are left out]" if left_out > 0 else text
