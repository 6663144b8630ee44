"""What the real router passes on of a request, and that what it drops reaches an engine all the same."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from asyncrl.engine.choice import FORWARDED
from asyncrl.engine.client import Client
from asyncrl.engine.router import register, router_argv
from asyncrl.ports import free_ports
from tests.fakes import completion, pieces, stream, tiny_config

KEY = "the-run's-key"


class Recorder:
    """A worker that keeps the requests it gets."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.path != "/generate":
            return web.json_response({})
        self.requests.append(msgspec.json.decode(await request.read()))
        return web.Response(body=stream(pieces(completion())), content_type="text/event-stream")


@asynccontextmanager
async def router_and_worker(folder: Path) -> AsyncIterator[tuple[str, Recorder]]:
    worker_port, router_port, metrics_port = free_ports("127.0.0.1", 3)
    recorder, app = Recorder(), web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", worker_port).start()
    url = f"http://127.0.0.1:{router_port}"
    with (folder / "router.log").open("w") as log:
        router = await asyncio.create_subprocess_exec(
            *router_argv(tiny_config().engine, url, metrics_port),
            env={**os.environ, "ASYNCRL_API_KEY": KEY},
            stdout=log,
            stderr=log,
        )
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
            await until_status(http, "/health", 200)
            assert (await http.get("/readiness")).status_code == 503  # nobody serves yet
            await register(http, f"http://127.0.0.1:{worker_port}", KEY)
            await until_status(http, "/readiness", 200)
        yield url, recorder
    finally:
        router.kill()
        await router.wait()
        await runner.cleanup()


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


async def ask(router: str, fields: dict[str, Any]) -> None:
    client = Client(
        router,
        run="choice",
        api_key=KEY,
        max_new_tokens=8,
        temperature=1.0,
        stop_token_ids=[],
        timeout=30.0,
        retry_timeout=0.0,
        coalesce=True,
        fields=fields,
    )
    await client.generate(group="g0")([1, 2])
    await client.close()


@pytest.mark.integration
def test_fields_reach_the_engine_through_the_router_or_past_it(tmp_path: Path) -> None:
    forwarded = {
        "priority": 3,
        "lora_path": "l",
        "session_params": {"id": "s"},
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [1],
        "return_text_in_logprobs": True,
        "return_hidden_states": True,
        "return_entropy": True,
        "custom_logit_processor": "c",
        "custom_labels": {"a": "b"},
        "data_parallel_rank": 0,
    }
    dropped = {"return_routed_experts": True, "return_prompt_token_ids": True}

    async def both() -> list[dict[str, Any]]:
        async with router_and_worker(tmp_path) as (router, recorder):
            await ask(router, forwarded)
            await ask(router, dropped)
            async with httpx.AsyncClient(base_url=router, headers={"Authorization": f"Bearer {KEY}"}) as http:
                await http.post("/generate", json={"input_ids": [1], "sampling_params": {}, **dropped})
            return recorder.requests

    by_router, past_router, cut = asyncio.run(both())
    own = {"input_ids", "sampling_params", "stream", "rid", "extra_key", "return_logprob"}
    assert own | forwarded.keys() == FORWARDED
    assert by_router.keys() >= FORWARDED
    assert {name: by_router[name] for name in forwarded} == forwarded
    assert {name: past_router.get(name) for name in dropped} == dropped
    assert not dropped.keys() & cut.keys(), "the router passes these on now: requests need not go past it"
