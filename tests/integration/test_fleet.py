"""Tests of the contract of real engines behind the real router."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.loads import Loads
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.engine.update import Update
from asyncrl.errors import EngineError
from asyncrl.extensions.counters import counters as counters_module
from asyncrl.network.addresses import Access, Addresses
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.schema import Completion
from tests.fakes import tiny_config
from tests.integration.fleet import Engines

pytestmark = pytest.mark.integration


@pytest.fixture
def addresses(two_engines: Engines) -> Addresses:
    """Return the addresses of engines and router, started by the launcher without the rest of a run."""
    return two_engines.addresses


def _client(addresses: Addresses, key: str | None = None, run: str = "t") -> GenerationClient:
    return GenerationClient(
        GenerateEndpoint(addresses.router, Access(key, addresses.authority) if key else addresses.access, 60.0),
        ClientSettings(
            run=run,
            max_new_tokens=48,
            temperature=1.0,
            stop_token_ids=[10],
            retry_timeout=30.0,
            coalesce=True,
        ),
    )


def _ask(addresses: Addresses, count: int, run: str) -> list[Completion]:
    async def ask() -> list[Completion]:
        client = _client(addresses, run=run)
        generate = client.generate()
        found = await asyncio.gather(*[generate([12, 1, 2, 3, 11]) for _ in range(count)])
        await client.close()
        return found

    return asyncio.run(ask())


def test_siblings_come_back_whole_and_each_with_its_own_tokens(addresses: Addresses) -> None:
    found = _ask(addresses, 12, "siblings")
    assert len({tuple(completion.token_ids) for completion in found}) > 1
    for completion in found:
        assert 1 <= len(completion.token_ids) <= 48
        assert completion.versions[0].version == 0
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 10 else "length")


def test_the_runs_key_guards_router_engine_and_control(addresses: Addresses) -> None:
    wrong = Access("wrong", addresses.authority).http
    engine = addresses.engines[0]
    for url in (f"{addresses.router}/generate", f"{engine}/generate", f"{engine}/pause_generation"):
        assert httpx.post(url, json={"input_ids": [12, 1, 11]}, **wrong).status_code in (401, 403), url

    async def ask() -> None:
        client = _client(addresses, key="wrong")
        try:
            await client.generate()([12, 1, 11])
        finally:
            await client.close()

    with pytest.raises(EngineError, match="401"):
        asyncio.run(ask())


def test_engine_counters_tell_truth_only_with_the_key(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "SCRAPE_SECONDS", 0.0)
    counters = counters_module.Counters()
    counters.start(RolloutRun(tiny_config(), addresses, addresses.model, print))  # type: ignore[arg-type]

    async def main() -> None:
        client, loads = _client(addresses), Loads(addresses.router, addresses.access, more=[counters.engines])
        times = [time.monotonic()]
        await loads.ask()
        times.append(time.monotonic())
        answer = await client.generate(group="counted")([12, 1, 2, 11])
        times.append(time.monotonic())
        found = await loads.ask()
        times.append(time.monotonic())
        rate = sum(load.more.get("tokens_per_s", 0.0) for load in found)
        assert 0.5 * len(answer.token_ids) <= rate * (times[3] - times[0])  # the counters were read in between
        assert rate * (times[2] - times[1]) <= 2 * len(answer.token_ids) + 2
        assert [load.more["preemptions"] for load in found] == [0.0, 0.0]
        await client.close()
        await loads.close()

    asyncio.run(main())
    for engine in addresses.engines:
        for headers in ({}, addresses.access.headers):  # with the run's key, the router would ask for anyone
            refused = httpx.get(f"{engine}/metrics", headers=headers, verify=addresses.access.context, trust_env=False)
            assert (refused.status_code, "sglang" in refused.text) == (401, False)


def test_engine_that_refuses_is_lost_with_its_own_words(addresses: Addresses) -> None:
    fleet = Fleet(addresses.engines[:1], addresses.access, 30.0)
    with pytest.raises(EngineError, match=f"{addresses.engines[0]}/update_weights_from_tensor answered"):
        fleet.call("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"], "flush_cache": False})
    fleet.close()


def test_request_in_flight_survives_and_names_its_change(addresses: Addresses) -> None:
    """Versions are published without weights, so the engines keep those of version 0, which they report again at the
    end."""
    fleet = Fleet(addresses.engines, addresses.access, 30.0)
    protocol = Update(fleet, mode="in_place")

    def publish(version: int) -> None:
        with protocol.paused():
            with protocol.session():
                pass
            protocol.label(version)

    async def publish_during(client: GenerationClient, version: int) -> list[Completion]:
        running = asyncio.gather(*[client.generate()([12, 1, 2, 3, 11]) for _ in range(64)])
        await asyncio.sleep(0.05)

        await asyncio.to_thread(publish, version)
        return await running

    async def attempts() -> list[Completion]:
        """Repeat until a publish falls into an answer, which takes a few tens of milliseconds."""
        client = _client(addresses, run="flight")
        mixed: list[Completion] = []
        for version in range(1, 30):
            found = await publish_during(client, version)
            mixed += [completion for completion in found if len(completion.versions) > 1]
            if mixed:
                break
        await client.close()
        return mixed

    try:
        mixed = asyncio.run(attempts())
    finally:
        publish(0)
        fleet.close()
    assert mixed, "no answer was written by two versions"
    for completion in mixed:
        assert [span.version for span in completion.versions] == sorted(span.version for span in completion.versions)
