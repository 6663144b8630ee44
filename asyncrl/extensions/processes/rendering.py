"""Training prompts that the processes that play render before they are drawn (processes.count=N), because chat
template and tokenizer cost more than all else that a group costs the rollout process.

A prompt that has not come when it is drawn is rendered here (rollout/prompts.py), so that neither the prompts nor their
order depend on whether, when and where they are rendered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncrl.rollout.prompts import Ahead

if TYPE_CHECKING:
    from asyncrl.extensions.processes.wire import RenderedQuestion

CHUNK = 16
"""Number of questions of a message."""
AHEAD, BATCHES = 256, 2
"""Smallest number of questions of a task that are rendered ahead, and in batches: a publish admits a batch at once."""


class RenderedAhead(Ahead):
    """The questions that processes were asked to render, and the tokens of those that have come."""

    def __init__(self, send: Callable[[list[tuple[str, int]]], None], batch_groups: int) -> None:
        """`send` asks a process to render these questions, by task and index."""
        self._send, self.most = send, max(AHEAD, BATCHES * batch_groups)
        self._unsent: list[tuple[str, int]] = []
        self._asked = Counter[tuple[str, int]]()  # a small task may have a question more than once among the next ones
        self._came: dict[tuple[str, int], msgspec.Raw] = {}

    def ask(self, task: str, index: int) -> None:
        """Let a question be rendered that will be drawn later."""
        self._asked[task, index] += 1
        again = self._asked[task, index] > 1
        if not again:
            self._unsent.append((task, index))
        if len(self._unsent) == CHUNK or (again and self._unsent):
            self._send(self._unsent)
            self._unsent = []

    def came(self, questions: Sequence[RenderedQuestion]) -> None:
        """Take what a process has rendered."""
        for one in questions:
            if (key := (one.task, one.index)) in self._asked:
                self._came[key] = one.token_ids

    def take(self, task: str, index: int) -> list[int] | None:
        """Return the tokens of a question that is drawn now, or None if they have not come."""
        key = task, index
        tokens = self._came.get(key)
        self._asked[key] -= 1
        if self._asked[key] <= 0:
            del self._asked[key]
            self._came.pop(key, None)
        return None if tokens is None else msgspec.msgpack.decode(tokens, type=list[int])
