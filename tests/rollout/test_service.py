"""The rollout process's HTTP service around a real buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from asyncrl.rollout import service as module
from asyncrl.rollout.buffer import CohortBuffer
from asyncrl.rollout.service import Service
from asyncrl.types import decode_batch
from tests.fakes import FakeClient, group

KEY = {"authorization": "Bearer key0"}


class FakeEvaluations:
    """What the service asks of them."""

    def __init__(self) -> None:
        self.asked: list[int | str] = []

    def published(self, version: int) -> None:
        self.asked.append(version)

    async def now(self) -> list[dict[str, Any]]:
        self.asked.append("now")
        return [{"accuracy": 0.5}]


class Site:
    """A service of batches of two, and an HTTP client at its door."""

    def __init__(self, bound: int = 1, *, drain: bool = False) -> None:
        self.client = FakeClient()
        self.evaluations = FakeEvaluations()
        self.published: list[tuple[dict[str, Any], list[str]]] = []
        self.service = Service(
            CohortBuffer(2, bound),
            self.client,  # type: ignore[arg-type]
            self.evaluations,  # type: ignore[arg-type]
            "key0",
            drain=drain,
            publish=lambda ledger, warnings: self.published.append((ledger, warnings)),
        )
        transport = httpx.ASGITransport(app=self.service.app())
        self.http = httpx.AsyncClient(transport=transport, base_url="http://service", headers=KEY)

    async def fill(self, count: int = 2) -> None:
        for _ in range(count):
            ticket = await self.service.ticket()
            await self.service.commit(ticket, group(ticket.slot, versions=(ticket.born,)), 4)


def at(play: Callable[[Site], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        site = Site(**settings)
        async with site.http:
            await asyncio.wait_for(play(site), 10)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)


def test_batches_and_versions_alternate_and_admission_follows_the_version() -> None:
    async def play(site: Site) -> None:
        for version in range(3):
            await site.fill(2)
            answer = await site.http.get("/batch", params={"version": version})
            assert answer.status_code == 200
            batch = decode_batch(answer.content)
            assert batch.version == version
            assert [one.slot for one in batch.groups] == [2 * version, 2 * version + 1]
            assert (await site.http.post("/hold")).status_code == 200
            assert (await site.http.post("/version", json={"version": version + 1})).status_code == 200
        assert site.client.calls == ["hold", 1, "hold", 2, "hold", 3]
        status = (await site.http.get("/status")).json()
        assert (status["version"], status["issued"], status["trained"]) == (3, 6, 6)
        assert "step 3 needs 2 ready groups" in status["waiting_for"]

    at(play, bound=0)


def test_batch_that_is_not_ready_is_202_with_what_it_waits_for() -> None:
    async def play(site: Site) -> None:
        await site.fill(1)
        answer = await site.http.get("/batch", params={"version": 0})
        assert answer.status_code == 202
        assert answer.text.startswith("step 0 needs 2 ready groups and has 1")
        await site.fill(1)  # nothing was lost by asking
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 200

    at(play)


def test_batch_wakes_with_the_commit_that_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 60.0)

    async def play(site: Site) -> None:
        asking = asyncio.create_task(site.http.get("/batch", params={"version": 0}))
        await site.fill(1)
        await asyncio.sleep(0.02)
        assert not asking.done()
        await site.fill(1)
        assert (await asking).status_code == 200

    at(play)


@pytest.mark.parametrize("version", [0, 2])
def test_any_version_but_the_next_is_409(version: int) -> None:
    async def play(site: Site) -> None:
        await site.fill(2)
        await site.http.get("/batch", params={"version": 0})
        answer = await site.http.get("/batch", params={"version": version})
        assert (answer.status_code, answer.text) == (409, f"the next batch is 1, not {version}")

    at(play)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/batch?version=0"),
        ("POST", "/hold"),
        ("POST", "/version"),
        ("POST", "/evaluate"),
        ("GET", "/status"),
        ("GET", "/health"),
    ],
)
def test_without_the_key_everything_is_401_and_nothing_happens(method: str, path: str) -> None:
    async def play(site: Site) -> None:
        await site.fill(2)
        for headers in ({"authorization": ""}, {"authorization": "Bearer key1"}, {"authorization": "key0"}):
            assert (await site.http.request(method, path, headers=headers, json={})).status_code == 401
        assert site.client.calls == []
        assert site.evaluations.asked == []
        assert (await site.http.get("/status")).json()["ready"] == 2

    at(play)


def test_publish_and_rejection_admit_who_waits() -> None:
    async def play(site: Site) -> None:
        first, second = await site.service.ticket(), await site.service.ticket()
        waiting = asyncio.create_task(site.service.ticket())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await site.service.reject(first, "judge", [])
        replay = await waiting
        assert (replay.slot, replay.attempt) == (first.slot, 1)
        for ticket in (replay, second):
            await site.service.commit(ticket, group(ticket.slot), 4)
        waiting = asyncio.create_task(site.service.ticket())
        await site.http.get("/batch", params={"version": 0})
        assert not waiting.done()
        await site.http.post("/version", json={"version": 1})
        assert (await waiting).slot == 2

    at(play, bound=0)


def test_same_version_again_lets_requests_go_and_trains_nothing() -> None:
    async def play(site: Site) -> None:
        await site.http.post("/hold")
        assert (await site.http.post("/version", json={"version": 0})).status_code == 200
        assert site.client.calls == ["hold", 0]
        assert (await site.http.get("/status")).json()["version"] == 0

    at(play)


def test_figures_of_a_batch_cover_what_was_committed_since_the_batch_before() -> None:
    async def play(site: Site) -> None:
        found = []
        for version in range(2):
            await site.fill(3 if version == 0 else 2)
            ticket = await site.service.ticket()
            await site.service.reject(ticket, "judge", [])
            answer = await site.http.get("/batch", params={"version": version})
            found.append(decode_batch(answer.content).rollout)
            await site.http.post("/version", json={"version": version + 1})
        assert [one["samples/generated"] for one in found] == [6, 4]
        assert [one["tokens/generated"] for one in found] == [12, 8]
        assert [one["groups/ready"] for one in found] == [1, 1]
        assert [one["groups/rejected"] for one in found] == [1, 2]
        assert found[0]["prefix_cache/hit"] == 0.25
        assert found[0]["time/engine_busy"] == 0.5

    at(play)


def test_evaluation_runs_on_request_and_hears_of_every_new_version() -> None:
    async def play(site: Site) -> None:
        assert (await site.http.post("/evaluate")).json() == [{"accuracy": 0.5}]
        for version in range(2):
            await site.fill(2)
            await site.http.get("/batch", params={"version": version})
            await site.http.post("/version", json={"version": version + 1})
            await site.http.post("/version", json={"version": version + 1})  # weights were sent anew
        assert site.evaluations.asked == ["now", 1, 2]

    at(play, bound=0)


def test_hold_in_a_drain_answers_only_once_nothing_is_in_flight() -> None:
    async def play(site: Site) -> None:
        site.client.in_flight = 3
        assert (await site.http.post("/hold")).status_code == 202
        assert site.client.calls == ["hold"]
        site.client.in_flight = 0
        assert (await site.http.post("/hold")).status_code == 200

    at(play, drain=True)


def test_every_version_leaves_its_ledger_and_a_drift_is_told_once() -> None:
    async def play(site: Site) -> None:
        for version in range(120):
            while (ticket := site.service._buffer.admit()) is not None:
                if ticket.attempt:
                    await site.service.commit(ticket, group(ticket.slot, tokens=2), 4)
                else:
                    await site.service.reject(ticket, "timeout", [40, 40])  # whatever takes long is lost
            assert (await site.http.get("/batch", params={"version": version})).status_code == 200
            assert (await site.http.post("/version", json={"version": version + 1})).status_code == 200
        assert [ledger["version"] for ledger, _ in site.published] == list(range(1, 121))
        assert site.published[-1][0]["tokens_generated"] == sum(
            site.published[-1][0][f"tokens_{place}"] for place in ("held", "trained", "rejected", "discarded")
        )
        (told,) = [text for _, warnings in site.published for text in warnings]
        assert "mean length 2 against" in told

    at(play)
