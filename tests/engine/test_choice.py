"""Requests that the router would cut go to engines directly: a group keeps its engine, none is overrun."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.choice import SHARE, choose
from asyncrl.errors import EngineError
from tests.engine.asking import asked, siblings
from tests.fakes import FakeEngine, echo

FIELDS = {"return_routed_experts": True}
URLS = [f"http://engine-{number}" for number in range(4)]
KEYS = [f"g{number:04d}" for number in range(400)]


def test_idle_engines_get_their_share_of_the_groups() -> None:
    counts = Counter(choose(key, dict.fromkeys(URLS, 0)) for key in KEYS)
    assert all(60 < counts[url] < 140 for url in URLS)


def test_an_engine_that_leaves_moves_only_its_own_groups() -> None:
    before = {key: choose(key, dict.fromkeys(URLS, 0)) for key in KEYS}
    after = {key: choose(key, dict.fromkeys(URLS[1:], 0)) for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != URLS[0])


@given(st.lists(st.sampled_from(KEYS), min_size=1, max_size=200), st.integers(1, 8))
def test_no_engine_gets_more_than_its_share(keys: list[str], engines: int) -> None:
    """Even when every request is of one group."""
    in_flight = dict.fromkeys([f"http://e{number}" for number in range(engines)], 0)
    for key in keys:
        in_flight[choose(key, in_flight)] += 1
        assert max(in_flight.values()) <= SHARE * sum(in_flight.values()) / engines + 1


class Fleet(FakeEngine):
    """A router that names its workers, and engines behind their own URLs; the dead break every request."""

    def __init__(self) -> None:
        super().__init__(echo())
        self.healthy, self.dead, self.asked = list(URLS), set[str](), list[str]()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        base = f"{request.url.scheme}://{request.url.host}"
        if request.url.path == "/workers":
            workers = [{"url": url, "is_healthy": url in self.healthy} for url in URLS]
            return httpx.Response(200, json={"workers": workers})
        self.asked.append(base)
        if base in self.dead:
            raise httpx.ReadError("reset", request=request)
        return await super().handle(request)


def test_a_field_that_the_router_drops_reaches_an_engine_and_others_go_by_the_router() -> None:
    fleet = Fleet()
    asked(fleet, siblings, fields=FIELDS)
    assert fleet.requests[0]["return_routed_experts"] is True
    assert fleet.asked[0] in URLS
    asked(fleet, siblings, fields={"priority": 3})
    assert fleet.requests[1]["priority"] == 3
    assert fleet.asked[1] == "http://router"


def test_an_engine_that_breaks_a_request_is_passed_over() -> None:
    fleet = Fleet()
    home = choose("g1", dict.fromkeys(URLS, 0))
    fleet.dead.add(home)

    async def twice(client: Any) -> None:
        for _ in range(2):
            await client.generate(group="g1")([12, 1, 11])

    asked(fleet, twice, fields=FIELDS, retry_timeout=5.0)
    assert fleet.asked[0] == home
    assert home not in fleet.asked[1:]
    assert len(fleet.asked) == 3


def test_without_a_healthy_engine_the_request_fails_with_that_reason() -> None:
    fleet = Fleet()
    fleet.healthy = []
    with pytest.raises(EngineError, match="knows no healthy engine"):
        asked(fleet, siblings, fields=FIELDS)
