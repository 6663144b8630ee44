"""Answers that lose their engine or router half-way equal undisturbed answers, token for token."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise

import pytest

from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.router import wait_until_ready
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.schema import Completion
from tests.integration.fleet import START, Engines

LENGTH = 48  # with what came of it a prompt must stay below the 58 tokens that SGLang takes of the tiny model's 64
PROMPTS = [[12, i % 10, (3 * i) % 10, (7 * i) % 10, 11] for i in range(16)]


@pytest.fixture
def fleet(two_engines: Engines) -> Engines:
    return two_engines


def client_of(fleet: Engines, stop_token_ids: list[int], *, coalesce: bool = True) -> GenerationClient:
    return GenerationClient(
        GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 60.0),
        ClientSettings(
            run=f"continuation-{time.monotonic()}",  # an engine may still know the last one's requests
            max_new_tokens=LENGTH,
            temperature=1.0,
            stop_token_ids=stop_token_ids,
            retry_timeout=START,
            coalesce=coalesce,
        ),
    )


@asynccontextmanager
async def bit_by_bit(fleet: Engines) -> AsyncIterator[None]:
    """Let the engines run for moments only, with pauses in which even a slow client receives all of their output."""
    engines = [f"engine-{number}" for number in range(len(fleet.addresses.engines))]

    def tell(number: int) -> None:
        for engine in engines:
            fleet.signal(engine, number)

    async def pulse() -> None:
        try:
            while True:
                tell(signal.SIGCONT)
                await asyncio.sleep(0.01)
                tell(signal.SIGSTOP)
                await asyncio.sleep(0.05)
        finally:
            tell(signal.SIGCONT)

    pulsing = asyncio.ensure_future(pulse())
    try:
        yield
    finally:
        pulsing.cancel()
        await asyncio.wait([pulsing])


async def greedy(
    fleet: Engines, during: Callable[[], Awaitable[None]] | None
) -> tuple[list[Completion], GenerationClient]:
    """Return the greedy answer to every prompt. `during` is called when the first tokens of all have arrived."""
    client = client_of(fleet, [])
    sessions = [client.generate(0.0, group=f"g{number:02d}") for number in range(len(PROMPTS))]
    async with bit_by_bit(fleet) if during else nullcontext():
        asking = asyncio.gather(*[session(prompt) for session, prompt in zip(sessions, PROMPTS, strict=True)])
        while during and not all(session.received for session in sessions):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.002)
    if during:
        await during()
    found = await asking
    await client.close()
    assert [session.received for session in sessions] == [len(one.token_ids) for one in found]
    return found, client


def whole_again(fleet: Engines, during: Callable[[], Awaitable[None]], broken: int) -> GenerationClient:
    """Request answers twice, the second time with a fault, compare them, and return the client that met the fault.

    If the engines were nearly finished, repeat until the fault interrupted the required number of requests.
    """
    expected, _ = asyncio.run(greedy(fleet, None))
    for _attempt in range(5):
        found, client = asyncio.run(greedy(fleet, during))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert [span.version for span in one.versions] == [0] * len(one.versions)
            assert all(before.inferred != after.inferred for before, after in pairwise(one.versions))
        if client.inflight.figures.continued["broken"] >= broken:
            return client
        fleet.revive()
    pytest.fail(f"no fault met {broken} requests under way")


@pytest.mark.integration
def test_siblings_of_one_request_have_their_answers_one_by_one(fleet: Engines) -> None:
    """An agent takes its next turn while its siblings are still in their first.

    (If siblings end at the same moment, they arrive together, and the test repeats.)
    """

    async def ask() -> bool:
        client = client_of(fleet, [0])  # the first of them ends at once, the last one some 40 tokens later
        async with bit_by_bit(fleet):
            asking = [asyncio.ensure_future(client.generate(group="siblings")(PROMPTS[0])) for _ in range(16)]
            done, others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        under_way = bool(others) and not await client.inflight.drained(0.0)
        first, rest = [one.result() for one in done], await asyncio.gather(*others)
        assert await client.inflight.drained(60.0)
        assert client.inflight.take_figures().requests == 1
        await client.close()
        if under_way:
            assert max(len(one.token_ids) for one in first) <= min(len(one.token_ids) for one in rest)
        return under_way

    assert any(asyncio.run(ask()) for _ in range(30))


@pytest.mark.integration
def test_router_is_killed_and_started_again(fleet: Engines) -> None:
    async def restart() -> None:
        fleet.kill("router")
        fleet.start("router")
        await wait_until_ready(fleet.addresses, START)

    whole_again(fleet, restart, broken=len(PROMPTS))


@pytest.mark.integration
def test_killed_engine_leaves_its_streams_to_the_other(fleet: Engines) -> None:
    async def hang() -> None:
        fleet.signal("engine-0", signal.SIGSTOP)
        await asyncio.sleep(0.5)  # the other goes on meanwhile
        fleet.kill("engine-0")

    figures = whole_again(fleet, hang, broken=1).inflight.figures
    assert 0 < figures.inferred_tokens < LENGTH * len(PROMPTS)
