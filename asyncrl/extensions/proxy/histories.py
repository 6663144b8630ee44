"""Lookup of the earlier answer that a request continues, for clients that send their whole history each time.

A chat continues an earlier one if its messages begin with those of an earlier request and the answer to it; its context
is then the tokens that the engine read and generated. A text continues an earlier one if it begins with an earlier text
and its completion, stop string included. The longest match wins. A client that changes a word of its history begins a
new context, and with it a new sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.schema import Exchange


@dataclass
class _Node:
    """A message in the tree of all messages of a session; `asked` is set if it is an answer."""

    asked: Exchange | None = None
    after: dict[bytes, _Node] = field(default_factory=dict)


class ChatHistories:
    """The chats of one session, in a tree of messages for each set of tools."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}

    def find(self, tools: bytes, messages: Sequence[bytes]) -> tuple[Exchange | None, int]:
        """Return the longest known chat that is a prefix of these messages, and its number of messages."""
        node, found, length = self._roots.get(tools), None, 0
        for place, key in enumerate(messages):
            node = node.after.get(key) if node else None
            if node is None:
                break
            if node.asked:
                found, length = node.asked, place + 1
        return found, length

    def keep(self, tools: bytes, messages: Sequence[bytes], asked: Exchange) -> None:
        """Store a chat whose last message is the answer. It replaces an earlier chat with the same messages."""
        node = self._roots.setdefault(tools, _Node())
        for key in messages:
            node = node.after.setdefault(key, _Node())
        node.asked = asked


class TextHistories:
    """The texts of one session."""

    def __init__(self) -> None:
        self._known: dict[str, Exchange] = {}

    def find(self, text: str) -> tuple[Exchange | None, str]:
        """Return the longest known text that is a prefix of this one, and the rest of this one."""
        found = max((known for known in self._known if text.startswith(known)), key=len, default=None)
        return (None, text) if found is None else (self._known[found], text[len(found) :])

    def keep(self, text: str, asked: Exchange) -> None:
        """Store a text that ends with the answer."""
        self._known[text] = asked
