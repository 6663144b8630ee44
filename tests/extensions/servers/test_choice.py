"""A request goes to the preferred server that has not failed lately, and waits only when all have failed."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.extensions.servers import choice
from asyncrl.extensions.servers.choice import EquivalentServers


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    async def pause(number: int) -> None:
        found.append(number)

    monkeypatch.setattr(choice, "pause", pause)
    return found


def test_servers_that_failed_come_last_the_oldest_failure_first(pauses: list[int]) -> None:
    async def main() -> list[str]:
        servers = EquivalentServers(["http://a/", "http://b", "http://c"])
        picked = [servers.pick(str)]
        for url in ("http://a", "http://b", "http://c"):
            await servers.failed(url, 1)
            await asyncio.sleep(0.01)  # so that the failures have an order
            picked.append(servers.pick(str))
        await servers.failed("http://a", 1)
        return [*picked, servers.pick(str)]

    assert asyncio.run(main()) == ["http://a", "http://b", "http://c", "http://a", "http://b"]


def test_failure_is_forgotten_after_a_rest(pauses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        servers = EquivalentServers(["http://a", "http://b"])
        await servers.failed("http://a", 1)
        monkeypatch.setattr(choice, "REST_SECONDS", 0.0)
        return servers.pick(str)

    assert asyncio.run(main()) == "http://a"


def test_request_waits_once_all_have_failed_each_time_longer(pauses: list[int]) -> None:
    async def main() -> None:
        servers = EquivalentServers(["http://a", "http://b"])
        for failures in range(1, 7):
            await servers.failed("http://a", failures)

    asyncio.run(main())
    assert pauses == [0, 1, 2]
