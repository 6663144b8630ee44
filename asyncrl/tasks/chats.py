"""Chat messages that precede a question."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.schema import Message


def head(system: str | None, shots: Iterable[tuple[str, str]] = ()) -> list[Message]:
    """Return the system message, if there is one, and the worked examples (question, answer)."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for question, answer in shots:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found
