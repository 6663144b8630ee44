"""Tests of the real router in front of recording workers: which requests it forwards and to which engine, and how it
reports failures."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.router import RouterWorkers, register, router_argv
from asyncrl.engine.stream import NO_WORKER, ROUTING_KEY, STREAM_ERROR, GenerateEndpoint
from asyncrl.network.addresses import Access
from asyncrl.network.ports import free_ports
from asyncrl.schema import Completion
from tests.fakes import completion, pieces, stream, tiny_config

KEY = "the-run's-key"
FIELDS: dict[str, Any] = {
    "priority": 3,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "custom_labels": {"a": "b"},
    "return_routed_experts": True,
    "return_prompt_token_ids": True,
    "null": None,
    "nested": {"of a later": ["version", 1.0, 1e-7]},
}


class Recorder:
    """Worker that keeps its requests, and breaks the next `breaks` answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.breaks, self.seconds = 0, 0.0
        self.answered = asyncio.Event()  # answers wait for it
        self.answered.set()
        self.known = asyncio.Event()  # the router learns its properties
        self.known.set()
        self.asked = asyncio.Event()
        self.answer = stream(pieces(completion()))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/generate":
            await self.known.wait()
            return web.json_response({})
        self.bodies.append(await request.read())
        self.asked.set()
        self.headers.append(dict(request.headers))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.breaks:
            self.breaks -= 1
            await response.write(b'data: {"output_ids": [], "meta_info": {"id": "0"}}\n\n')
            await asyncio.sleep(0.2)  # the router has the event
            assert request.transport
            request.transport.abort()
        else:
            await asyncio.sleep(self.seconds)
            await self.answered.wait()
            await response.write(self.answer)
        return response


@asynccontextmanager
async def router_and_workers(
    folder: Path, count: int, policy: str = "manual"
) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Recorder]]]:
    """Yield a client of the router, and its registered workers by URL."""
    router_port, metrics_port, *ports = free_ports("127.0.0.1", 2 + count)
    workers, runners = {f"http://127.0.0.1:{port}": Recorder() for port in ports}, []
    for port, recorder in zip(ports, workers.values(), strict=True):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", port).start()
    url = f"http://127.0.0.1:{router_port}"
    with (folder / f"router-{policy}.log").open("w") as log:
        router = await asyncio.create_subprocess_exec(
            *router_argv(tiny_config(**{"engine.router_policy": policy}).engine, url, metrics_port),
            env={**os.environ, "ASYNCRL_API_KEY": KEY},
            stdout=log,
            stderr=log,
        )
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30.0) as http:
            await until_status(http, "/health", 200)
            assert (await http.get("/readiness")).status_code == 503  # there is no worker yet
            for worker in workers:
                await register(http, worker, KEY)
            await until_status(http, "/readiness", 200)
            for _ in range(600):
                if sum(one["is_healthy"] for one in (await http.get("/workers")).json()["workers"]) == count:
                    break
                await asyncio.sleep(0.05)
            yield http, workers
    finally:
        router.kill()
        await router.wait()
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def router_and_worker(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str, Recorder]]:
    """Yield a client of the router, the worker's URL, and the registered worker."""
    async with router_and_workers(folder, 1) as (http, workers):
        ((worker, recorder),) = workers.items()
        yield http, worker, recorder


async def until_status(http: httpx.AsyncClient, path: str, status: int) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            if (await http.get(path)).status_code == status:
                return
        except httpx.TransportError:
            pass  # not listening yet
        assert time.monotonic() < deadline, f"{path} never answered {status}"
        await asyncio.sleep(0.1)


def client_of(http: httpx.AsyncClient, retry_timeout: float, fields: dict[str, Any], **more: Any) -> GenerationClient:
    """Return a client of this router."""
    settings = ClientSettings(
        run="router",
        max_new_tokens=8,
        temperature=1.0,
        stop_token_ids=[],
        retry_timeout=retry_timeout,
        coalesce=True,
        fields=fields,
        **more,
    )
    return GenerationClient(GenerateEndpoint(str(http.base_url), Access(KEY), 30.0), settings)


async def ask(http: httpx.AsyncClient, retry_timeout: float = 0.0, **fields: Any) -> Completion:
    client = client_of(http, retry_timeout, fields)
    try:
        return await client.generate(group="g0")([1, 2])
    finally:
        await client.close()


@pytest.mark.integration
def test_requests_and_answers_pass_through_byte_for_byte(tmp_path: Path) -> None:
    request = msgspec.json.encode({"input_ids": [1], "sampling_params": {"n": 1, "unknown": 1.50}, **FIELDS})
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Content-Type": "application/json", ROUTING_KEY: "g1", "traceparent": trace}

    async def both() -> None:
        async with router_and_worker(tmp_path) as (http, worker, recorder):
            assert (await ask(http, **FIELDS)).token_ids
            sent = msgspec.json.decode(recorder.bodies[0])
            assert {name: sent[name] for name in FIELDS} == FIELDS
            recorder.answer = b'data: {"unknown": {"b": 1.50}, "meta_info": {"routed_experts": "%s"}}\n\n' % (
                b"A" * 10_000_000
            )
            answer = await http.post("/generate", content=request, headers=headers)
            assert recorder.bodies[1] == request
            assert {name.lower(): value for name, value in recorder.headers[1].items()}["traceparent"] == trace
            assert answer.content == recorder.answer
            assert answer.headers["x-smg-routed-worker-id"] == worker

    asyncio.run(both())


@pytest.mark.integration
def test_broken_answer_is_reported_and_retried(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, _, recorder):
            recorder.breaks = 1
            told = await http.post("/generate", json={"input_ids": [1], "stream": True})
            assert told.status_code == 200
            assert f'"type":"{STREAM_ERROR}"' in told.text
            recorder.breaks = 2
            assert (await ask(http, retry_timeout=30.0)).token_ids
            assert len(recorder.bodies) == 1 + 3

    asyncio.run(main())


@pytest.mark.integration
def test_requests_wait_while_no_engine_is_registered(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, worker, _):
            workers = RouterWorkers(str(http.base_url), Access(KEY), 30.0)
            await asyncio.to_thread(workers.remove, worker)
            await until_status(http, "/readiness", 503)
            for _ in range(600):
                refused = await http.post("/generate", json={"input_ids": [1]})
                if refused.status_code != 503:  # for a moment: the engine is known, and has gone
                    break
                await asyncio.sleep(0.05)
            assert refused.status_code == 404
            assert NO_WORKER in refused.text
            asking = asyncio.create_task(ask(http, retry_timeout=30.0))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(workers.keep, [worker])
            await asyncio.to_thread(workers.add, worker)  # registering it twice is no error
            assert (await asking).token_ids

    asyncio.run(main())


@pytest.mark.integration
def test_serving_engine_is_known_before_the_first_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, worker, recorder):
            engines: asyncio.Queue[str] = asyncio.Queue()
            endpoint = GenerateEndpoint(str(http.base_url).rstrip("/"), Access(KEY), 30.0)
            recorder.seconds = 20.0

            async def read() -> None:
                async for _ in endpoint.stream({"input_ids": [1], "stream": True}, "g", {}, engines.put_nowait):
                    pass

            reading = asyncio.create_task(read())
            assert await asyncio.wait_for(engines.get(), 15.0) == worker
            reading.cancel()
            await endpoint.close()

    asyncio.run(main())


@pytest.mark.integration
def test_engine_removed_before_listing_is_not_listed_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_workers(tmp_path, 2) as (http, recorders):
            workers = RouterWorkers(str(http.base_url), Access(KEY), 30.0)
            early, late = recorders
            for worker in recorders:
                await asyncio.to_thread(workers.remove, worker)
            recorders[early].known.clear()
            await asyncio.to_thread(workers.add, early)
            removing = asyncio.create_task(asyncio.to_thread(workers.remove, early))
            await asyncio.wait([removing], timeout=0.5)  # the router is told to forget the engine that it does not list
            recorders[early].known.set()
            await removing
            await asyncio.to_thread(workers.add, late)
            await until_status(http, "/readiness", 200)
            assert await listed(http) == [late]

    asyncio.run(main())


@pytest.mark.integration
def test_removed_engine_is_forgotten_though_requests_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, worker, recorder):
            workers = RouterWorkers(str(http.base_url), Access(KEY), 30.0)
            recorder.seconds = 3.0
            asking = asyncio.create_task(ask(http))
            await recorder.asked.wait()
            await asyncio.to_thread(workers.remove, worker)
            assert await listed(http) == []
            assert not asking.done()
            assert (await asking).token_ids

    asyncio.run(main())


@pytest.mark.integration
def test_engine_listed_long_after_removal_is_removed_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.engine.router.LISTED_SECONDS", 0.0)

    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, worker, recorder):
            workers = RouterWorkers(str(http.base_url), Access(KEY), 30.0)
            await asyncio.to_thread(workers.remove, worker)
            await until_status(http, "/readiness", 503)
            recorder.known.clear()
            await asyncio.to_thread(workers.add, worker)
            await asyncio.to_thread(workers.remove, worker)
            recorder.known.set()
            await until_status(http, "/readiness", 200)
            await asyncio.to_thread(workers.keep, [])
            await until_status(http, "/readiness", 503)

    asyncio.run(main())


async def listed(http: httpx.AsyncClient) -> list[str]:
    """Return the engines that the router knows."""
    return [worker["url"] for worker in (await http.get("/workers")).json()["workers"]]


@pytest.mark.integration
def test_the_key_protects_requests_and_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with router_and_worker(tmp_path) as (http, worker, recorder):
            for method, path in (("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers")):
                for key in ("none", f"{KEY}s"):
                    # the router may close a connection whose request it has refused, without having read the body
                    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
                    answer = await http.request(method, path, json={"url": worker}, headers=headers)
                    assert answer.status_code == 401
            assert not recorder.bodies

    asyncio.run(main())


ENGINES, GROUPS, SIBLINGS, TURNS = 4, 20, 4, 3
PROMPT = 200
"""Tokens of a group's prompt, enough for policies that look for common prefixes."""


@dataclass
class Spread:
    """How the requests of groups were spread over engines."""

    groups: float
    """Mean fraction of a group's requests on the engine that got most of them."""
    episodes: float
    """Mean fraction of an episode's turns on the engine that got most of them."""
    busiest: float
    """Requests of the engine that got most, relative to an even spread."""


async def spread(folder: Path, policy: str) -> Spread:
    """Play groups of siblings with several turns through the router.

    Requests are sent one after the other and answered once all of their turn are in flight, so that what the router
    knows when it chooses does not depend on the speed of this machine.
    """
    by_group: dict[str, Counter[str]] = defaultdict(Counter)
    by_episode: dict[str, Counter[str]] = defaultdict(Counter)
    async with router_and_workers(folder, ENGINES, policy) as (http, workers):
        client = GenerationClient(
            GenerateEndpoint(str(http.base_url), Access(KEY), 60.0),
            ClientSettings("spread", 8, 1.0, [], retry_timeout=0.0, coalesce=False),
        )
        contexts = {(group, sibling): [100 + group] * PROMPT for group in range(GROUPS) for sibling in range(SIBLINGS)}

        for turn in range(TURNS):
            asked, answered = asyncio.Event(), asyncio.Event()
            for recorder in workers.values():
                recorder.asked, recorder.answered = asked, answered
            running: dict[tuple[int, int], asyncio.Task[Completion]] = {}
            order = list(contexts)
            if turn:
                order = random.Random(turn).sample(order, len(order))
            for group, sibling in order:
                context = contexts[group, sibling]
                context += [1000 + 10 * sibling + turn] * 3
                generate = client.generate(group=f"g{group}", sample=f"{group}/{sibling}")
                running[group, sibling] = asyncio.create_task(generate(context))
                async with asyncio.timeout(60.0):
                    await asked.wait()
                asked.clear()
            answered.set()
            for episode, answer in running.items():
                contexts[episode] += (await answer).token_ids
        await client.close()
    for url, recorder in workers.items():
        for body in recorder.bodies:
            tokens = msgspec.json.decode(body)["input_ids"]
            group, sibling = tokens[0] - 100, (tokens[PROMPT] - 1000) // 10
            by_group[f"{group}"][url] += 1
            by_episode[f"{group}/{sibling}"][url] += 1

    def mean_share(counts: dict[str, Counter[str]]) -> float:
        return sum(max(of.values()) / of.total() for of in counts.values()) / len(counts)

    requests = [len(recorder.bodies) for recorder in workers.values()]
    assert sum(requests) == GROUPS * SIBLINGS * TURNS
    return Spread(mean_share(by_group), mean_share(by_episode), max(requests) * ENGINES / sum(requests))


@pytest.mark.integration
def test_what_each_policy_does_to_groups_and_to_balance(tmp_path: Path) -> None:
    """Only two of the policies are random, whose bounds are wide."""

    def found(policy: str) -> Spread:
        spread_out = asyncio.run(spread(tmp_path, policy))
        print(policy, spread_out)
        return spread_out

    manual = found("manual")
    assert manual.groups == manual.episodes == manual.busiest == 1.0
    assert found("consistent_hashing").groups == 1.0, "but engines get unequal numbers of groups"
    aware = found("cache_aware")
    assert min(aware.groups, aware.episodes) > 0.95
    assert aware.busiest < 1.5
    turns = found("round_robin")
    assert turns.groups < 0.6
    assert turns.busiest == 1.0
    assert found("random").groups < 0.65, "0.41 on average, 0.47 at most in 40 trials"


@pytest.mark.integration
def test_router_starts_without_power_of_two_and_workers(tmp_path: Path) -> None:
    """That is why engine.router_policy does not offer it: engines are registered when they are up."""
    argv = router_argv(tiny_config().engine, "http://127.0.0.1:1", 2)
    argv[argv.index("--policy") + 1] = "power_of_two"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "requires at least 2 workers" in done.stderr
