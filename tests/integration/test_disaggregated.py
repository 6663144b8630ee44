"""Engines that only prefill and engines that only decode, behind the real router: scripted ones, and in a campaign real
ones on CPUs, where the package mooncake-transfer-engine-non-cuda is installed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from aiohttp import web

from asyncrl.engine.router import register, router_argv
from asyncrl.network.ports import free_ports
from tests.fakes import completion, pieces, stream, tiny_config
from tests.integration.fleet import engines
from tests.integration.publisher import SeededWeights, make, publish
from tests.integration.test_router import KEY, client_of, until_status
from tests.integration.test_weights import PROMPT, ask, logprobs, publish_under_way, settings, whole

pytestmark = pytest.mark.integration

ANSWER = completion()
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
APART = {"engine.count": 0, "engine.prefill_count": 1, "engine.decode_count": 2, "rollout.coalesce": False}


class Part:
    """An engine that keeps its requests and answers all of them alike."""

    def __init__(self, answer: bytes) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({})
        self.requests.append(msgspec.json.decode(await request.read()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.answer)
        return response

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def routed(folder: Path, prefill: Part, decoding: list[Part]) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Yield a client of a router that routes to all of them, and the port at which the prefilling one is met."""
    router_port, metrics_port, met, *ports = free_ports("127.0.0.1", 4 + len(decoding))
    url = f"http://127.0.0.1:{router_port}"
    with (folder / "router.log").open("w") as log:
        router = await asyncio.create_subprocess_exec(
            *router_argv(tiny_config(**APART).engine, url, metrics_port),
            env={**os.environ, "ASYNCRL_API_KEY": KEY},
            stdout=log,
            stderr=log,
        )
    try:
        async with AsyncExitStack() as open_until_end:
            http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
            await open_until_end.enter_async_context(http)
            await until_status(http, "/health", 200)
            duties = [("prefill", met), *[("decode", 0)] * len(decoding)]
            for part, port, duty in zip([prefill, *decoding], ports, duties, strict=True):
                await register(http, await open_until_end.enter_async_context(part.serving(port)), KEY, duty)
            await all_healthy(http, len(ports))
            yield http, met
    finally:
        router.kill()
        await router.wait()


async def all_healthy(http: httpx.AsyncClient, count: int) -> None:
    for _ in range(600):
        workers = (await http.get("/workers")).json()["workers"]
        if sum(worker["is_healthy"] for worker in workers) == count:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(workers)


def test_a_request_goes_to_an_engine_of_each_kind_and_the_one_that_decodes_answers(tmp_path: Path) -> None:
    prefill = Part(stream(pieces(completion(tokens=1))))
    decoding = [Part(stream(pieces(ANSWER))) for _ in range(2)]

    async def main() -> int:
        async with routed(tmp_path, prefill, decoding) as (http, met):
            client = client_of(http, 5.0, {"custom_labels": {"a": "b"}}, coalesce=False)
            answers = [await client.generate(group=f"g{number // 3}")([1, 2]) for number in range(12)]
            await client.close()
            assert answers == [ANSWER] * 12
            return met

    met = asyncio.run(main())
    sent = {request["rid"]: request for request in prefill.requests}
    received = {request["rid"]: request for part in decoding for request in part.requests}
    assert len(received) == 12
    assert sent == received
    assert len({request["bootstrap_room"] for request in sent.values()}) == 12
    for request in sent.values():
        assert (request["bootstrap_host"], request["bootstrap_port"]) == ("127.0.0.1", met)
        assert request["custom_labels"] == {"a": "b"}
        assert request["stream"] is request["return_logprob"] is True
    places = {request["rid"]: number for number, part in enumerate(decoding) for request in part.requests}
    in_order = [places[rid] for rid in sorted(places)]
    assert [len(set(in_order[first : first + 3])) for first in range(0, 12, 3)] == [1] * 4  # a group stays where it is


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake-transfer-engine-non-cuda is not installed")
@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_a_real_pair_serves_what_is_published_while_requests_are_in_flight(mode: str, tmp_path: Path) -> None:
    apart = ("engine.count=0", "engine.prefill_count=1", "engine.decode_count=2", "rollout.coalesce=false")
    with engines(tmp_path, *apart, "engine.transfer_backend=mooncake_tcp", "engine.dtype=float32") as fleet:
        weights = SeededWeights(fleet.addresses.model, share=0.05)
        config = settings(fleet.config, transport="tensor", verify_every=1, pause_mode=mode)
        publisher = make(config, fleet.addresses, weights, tmp_path)
        assert publish(publisher, 1)["engines"] == 3
        for found in ask(fleet, 6, 1, run="before"):
            whole(found)
            assert {span.version for span in found.versions} == {1}
            expected = logprobs(weights.at(1), fleet, PROMPT, found)
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-4)
        for serving in range(1, 7, 2):
            _, answers = asyncio.run(publish_under_way(publisher, fleet, serving, (serving + 1, serving + 2)))
            for found in answers:
                whole(found)
                first = found.versions[0]  # later tokens read a cache of older weights
                expected = logprobs(weights.at(first.version), fleet, PROMPT, found)[: first.end]
                told = torch.tensor(found.logprobs[: first.end])
                torch.testing.assert_close(told, expected, rtol=0, atol=1e-4)
        publisher._fleet.close()
