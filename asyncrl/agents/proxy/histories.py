"""Which answer a request goes on from: token in, token out, for clients that send their whole history each time.

A chat goes on where its messages begin with those of an earlier request and the answer to it: from the tokens that the
engine read and wrote then. A text goes on where it begins with an earlier text and what was written after it. The
longest wins. A client that changes a word of its history begins a context, and with it a sample, of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.agents.linking import Asked


@dataclass
class _Node:
    """A message in the tree of all that were sent; `asked` is told where it is an answer."""

    asked: Asked | None = None
    after: dict[bytes, _Node] = field(default_factory=dict)


class Chats:
    """Of one session, by their tools."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}

    def find(self, tools: bytes, messages: Sequence[bytes]) -> tuple[Asked | None, int]:
        """The longest chat that these messages begin with, and how many of them it takes."""
        node, found, length = self._roots.get(tools), None, 0
        for place, key in enumerate(messages):
            node = node.after.get(key) if node else None
            if node is None:
                break
            if node.asked:
                found, length = node.asked, place + 1
        return found, length

    def keep(self, tools: bytes, messages: Sequence[bytes], asked: Asked) -> None:
        """These messages, the last of which is the answer. Of two that read alike the later counts."""
        node = self._roots.setdefault(tools, _Node())
        for key in messages:
            node = node.after.setdefault(key, _Node())
        node.asked = asked


class Texts:
    """Of one session."""

    def __init__(self) -> None:
        self._known: dict[str, Asked] = {}

    def find(self, text: str) -> tuple[Asked | None, str]:
        """The longest that this one begins with, and the rest."""
        found = max((known for known in self._known if text.startswith(known)), key=len, default=None)
        return (None, text) if found is None else (self._known[found], text[len(found) :])

    def keep(self, text: str, asked: Asked) -> None:
        """With the answer at its end."""
        self._known[text] = asked
