"""A rollout service over a real buffer, with an HTTP client at its source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec

from asyncrl.engine.loads import load_of
from asyncrl.engine.session import GenerationSession
from asyncrl.observability.timeline import Record
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.snapshot import ResumableBuffer, ResumableGroups
from asyncrl.rollout.status import StatusFile
from asyncrl.rollout.timelines import Timelines
from tests.engine.asking import RANK
from tests.fakes import FakeClient, addresses, group, prompts
from tests.rollout.machinery import KEY


class Site:
    """A service of batches of two, and an HTTP client at its source."""

    def __init__(self, bound: int = 1, *, drain: bool = False, **options: Any) -> None:
        self.client = FakeClient()
        self.evaluations = FakeEvaluations()
        self.prompts = prompts()
        self.published: list[dict[str, Any]] = []
        self.records: list[Record] = []
        self.groups = ResumableGroups(
            ResumableBuffer(2, bound, **options),
            self.client,  # type: ignore[arg-type]
            publish=self.published.append,
            timelines=Timelines([self.records.append]),
        )
        self.server = RolloutServer(
            self.groups,
            self.client.inflight,  # type: ignore[arg-type]
            self.evaluations,  # type: ignore[arg-type]
            "key0",
            drain=drain,
        )
        self.connect()

    def connect(self) -> None:
        """Let the client see the routes that the server has now."""
        transport = httpx.ASGITransport(app=self.server.app())
        self.http = httpx.AsyncClient(transport=transport, base_url="http://service", headers=KEY)

    async def fill(self, count: int = 2) -> None:
        for _ in range(count):
            await self.play(await self.groups.ticket())

    async def play(self, ticket: Ticket, tokens: int = 2, reject: str | None = None) -> None:
        """A group of two, with this many tokens each, is committed or rejected."""
        sessions = self.begin(ticket)
        for session in sessions:
            self.receive(session, tokens)
        if reject:
            await self.groups.reject(ticket, reject)
        else:
            played = group(ticket.slot, versions=(ticket.born,), tokens=tokens)
            await self.groups.commit(ticket, msgspec.structs.replace(played, uid=ticket.uid))

    def begin(self, ticket: Ticket) -> list[GenerationSession]:
        sessions: list[GenerationSession] = [self.client.generate(group=ticket.uid) for _ in range(2)]
        self.groups.begin(ticket, self.groups.draw(lambda: next(self.prompts)), sessions)
        return sessions

    def receive(self, session: GenerationSession, tokens: int) -> None:
        """Count a chunk as engine/inflight.py does."""
        self.client.tokens[session.purpose] += tokens
        session.hear(tokens)


def at(play: Callable[[Site], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        site = Site(**settings)
        async with site.http:
            await asyncio.wait_for(play(site), 60)

    asyncio.run(main())


def file_of(site: Site, folder: Path) -> StatusFile:
    loads: Any = FakeLoads()
    return StatusFile(folder, site.server, loads, addresses(engines=2))


class FakeEvaluations:
    """Stand-in with the parts of the evaluations that the server uses."""

    def __init__(self) -> None:
        self.asked: list[int | str] = []
        self.ends = asyncio.Event()
        self.ends.set()

    def published(self, version: int) -> None:
        self.asked.append(version)

    async def now(self) -> list[dict[str, Any]]:
        self.asked.append("now")
        await self.ends.wait()
        return [{"accuracy": 0.5}]


class FakeLoads:
    """Answers for the first engine alone."""

    latest: tuple[Any, ...] = ()

    async def recent(self, age: float) -> list[Any]:
        return [load_of([RANK], addresses().engines[0])]
