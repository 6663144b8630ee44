"""A real Prometheus scrapes a rollout server, and every query of the board finds data there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from asyncrl.engine.loads import load_of
from asyncrl.extensions.observe.exposition import PrometheusMetrics
from asyncrl.jsonl import append
from asyncrl.metrics import fields
from asyncrl.network.ports import free_port
from asyncrl.network.tls import Authority, signed
from asyncrl.observability.intervals import PHASES, Interval
from asyncrl.observability.timeline import BatchTimeline, PublishTimeline
from tests.engine.asking import RANK
from tests.extensions.observe.observing import observing
from tests.extensions.timelines.made import episode, group
from tests.fakes import addresses
from tests.integration.running import start, wait_for_step
from tests.ops.programs import found
from tests.rollout.service import Site, file_of

UP = 'up{run="a run"} == 1'
"""Query that finds data if the run was scraped last."""
OPS = Path(__file__).parents[2] / "ops"


@contextmanager
def prometheus(folder: Path, *runs: Path) -> Iterator[httpx.Client]:
    """Start Prometheus with the configuration of these runs, and return a client of its API."""
    port = free_port("127.0.0.1")
    command = [sys.executable, str(OPS / "prometheus" / "scrape_config.py"), "--seconds", "1", *map(str, runs)]
    config = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / "prometheus.yml").write_text(config)
    subprocess.run([found("promtool"), "check", "config", str(folder / "prometheus.yml")], check=True)
    data = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            [found("prometheus"), *data, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=10) as client:
                yield client
        finally:
            server.terminate()
            server.wait(120)


def result(client: httpx.Client, query: str) -> list[Any]:
    """Return what a query finds; nothing while Prometheus starts."""
    try:
        answer = client.get("/query", params={"query": query})
    except httpx.TransportError:
        return []
    return list(answer.json()["data"]["result"]) if answer.status_code == 200 else []


def without_data(client: httpx.Client, queries: list[str], seconds: float) -> list[str]:
    """Return the queries that find nothing within so many seconds."""
    deadline, left = time.monotonic() + seconds, list(queries)
    while left and time.monotonic() < deadline:
        left = [query for query in left if not result(client, query)]
        time.sleep(0.3 if left else 0.0)
    return left


class Busy:
    """Engine with counters."""

    async def recent(self, age: float) -> list[Any]:
        load = load_of([RANK], addresses().engines[0])
        return [replace(load, more={"tokens_per_s": 5.0, "cache_hit": 0.5, "preemptions": 1.0})]


def played(metrics: PrometheusMetrics, number: int) -> None:
    """Record a group that used every phase, its batch and the publish."""
    intervals = [Interval(phase, 0.0, 1.0, "search", outcome="down") for phase in PHASES]
    metrics(group(f"g{number}", episode(1.0, *intervals)))
    metrics(BatchTimeline(number, asked=0.0, taken=1.0, uids=[f"g{number}"]))
    metrics(PublishTimeline(number, held=0.0, released=0.5))


def authority_file(run_dir: Path, url: str) -> dict[str, Any]:
    """Create the certificate of a server and return it as an argument of uvicorn."""
    authority = Authority.create(run_dir)
    authority.sign([url])
    certificate = signed(run_dir, url)
    assert certificate
    return {"ssl_certfile": certificate.server}


@pytest.mark.integration
def test_every_query_of_the_board_finds_data(tmp_path: Path) -> None:
    board = pytest.importorskip("ops.grafana.board", reason="grafana-foundation-sdk is not installed")
    port = free_port("127.0.0.1")
    where = addresses(rollout=f"https://127.0.0.1:{port}")
    where.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "a run"}}))
    documented = fields.of_steps()
    append(tmp_path / "metrics.jsonl", dict.fromkeys(documented, 0.5))
    append(tmp_path / "eval.jsonl", dict.fromkeys(fields.EVAL, 0.5) | {"set": "sum"})
    hooks = observing(tmp_path, where=where)
    metrics = hooks.exposed
    queries = [query for row in board.ROWS for query in board.expressions(row)]

    async def main() -> None:
        site = Site()
        site.begin(await site.groups.ticket())
        status = file_of(site, tmp_path)
        loads = await Busy().recent(0.0)
        site.server.more = list(hooks.routes(site.server, lambda: status.now(loads)))

        async def play() -> None:
            for number in range(10**6):
                played(metrics, number)
                await asyncio.sleep(0.2)

        playing = asyncio.create_task(play())
        certificate = authority_file(tmp_path, where.rollout)
        server = uvicorn.Server(uvicorn.Config(site.server.app(), port=port, log_level="error", **certificate))
        serving = asyncio.create_task(server.serve())
        with prometheus(tmp_path, tmp_path) as client:
            missing = await asyncio.to_thread(without_data, client, [*queries, UP], 180.0)
        server.should_exit = True
        await serving
        playing.cancel()
        assert missing == []

    found("prometheus")
    asyncio.run(main())


@pytest.mark.campaign
def test_every_query_finds_data_of_a_whole_run_that_has_no_tools(tmp_path: Path) -> None:
    board = pytest.importorskip("ops.grafana.board", reason="grafana-foundation-sdk is not installed")
    found("prometheus")
    queries = [query for row in board.ROWS if row != board.OF_TOOLS for query in board.expressions(row)]
    with start(tmp_path / "run", "run.max_steps=5000") as process:
        wait_for_step(process, tmp_path / "run", 2)
        with prometheus(tmp_path, tmp_path / "run") as client:
            assert without_data(client, queries, 60.0) == []
