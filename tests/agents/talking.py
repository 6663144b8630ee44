"""An engine for agents: it answers what it is told to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.schema import Completion, Exchange, Template, VersionSpan
from tests.fakes import FakeTemplate

DEADLINE = 30.0
EOS = 10


def written(*ids: int, finish: str = "stop") -> Completion:
    """Return a completion. Each token has its own log-probability, so no two completions are equal by chance."""
    return Completion(list(ids), [-0.125 * (1 + n) for n in range(len(ids))], [VersionSpan(0, 0, len(ids))], finish)


class Talking:
    """A `generate` that gives these completions, one after the other."""

    temperature = 1.0

    def __init__(self, answers: Iterable[Completion], template: Template | None = None) -> None:
        self.template: Template = template or FakeTemplate()
        self._answers: Iterator[Completion] = iter(answers)
        self.asked: list[Exchange] = []
        self.limits: list[int | None] = []
        self.stops: list[list[str]] = []

    async def __call__(
        self,
        token_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
        stop: Sequence[str] = (),
    ) -> Completion:
        answer = next(self._answers)
        self.asked.append(Exchange(list(token_ids), answer, role))
        self.limits.append(max_new_tokens)
        self.stops.append(list(stop))
        return answer


class Spoken(FakeTemplate):
    """Template that keeps the digits of messages which contain other characters too."""

    def begin(self, messages: Any, tools: Any = ()) -> list[int]:
        digits = ["".join(c for c in one["content"] if c.isdigit()) for one in messages]
        return super().begin([{"content": one} for one in digits], tools)


async def dead(*pids: int) -> None:
    """Within the deadline: the kernel takes a moment."""
    async with asyncio.timeout(DEADLINE):
        while any(map(alive, pids)):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
