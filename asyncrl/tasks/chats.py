"""How a question is asked: what stands before it in the chat."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.types import Message


def head(system: str | None, shots: Iterable[tuple[str, str]] = ()) -> list[Message]:
    """A system message, if there is one, and worked examples (question, answer)."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for question, answer in shots:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found
