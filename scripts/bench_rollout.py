"""Benchmark of the rollout process with a stub engine that streams like SGLang (scripts/stub_engine.py).

It measures the trajectories in flight on one core, the CPU time per request and per streamed chunk compared with a
plain aiohttp client, the memory per trajectory, the event-loop lag, the CPU time per token of long and of short
answers, buffer operations by size, and the process with the buffer (processes.count) for each sample. It prints
tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import httpx
import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.engine.client import ClientSettings, GenerationClient  # noqa: E402
from asyncrl.engine.stream import GenerateEndpoint  # noqa: E402
from asyncrl.network.addresses import Access  # noqa: E402
from asyncrl.network.ports import free_port  # noqa: E402
from asyncrl.rollout.buffer import CohortBuffer  # noqa: E402
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan  # noqa: E402
from scripts import machine, rollout_processes  # noqa: E402

OWN_CORE, STUB_CORE = 0, 1
PROMPT = [1, 2, 3, 4]
LONG = 32_768


@contextmanager
def stub(*, tokens: int, interval: int, pace: float, host: str = "127.0.0.1") -> Iterator[str]:
    """Run a stub engine with `pace` seconds per token in its own process and on its own core. Yield its URL."""
    port = free_port(host)
    shape = {"per_token": max(pace, 1e-9), "per_request": 0.0, "max_running": 1 << 20}
    flags = [f"--tokens={tokens}", f"--interval={interval}", f"--shape={json.dumps(shape)}"]
    core = STUB_CORE % (os.cpu_count() or 1)
    command = [sys.executable, str(ROOT / "scripts/stub_engine.py"), str(port), f"--core={core}", *flags]
    process = subprocess.Popen([*command, f"--host={host}"])
    url = f"http://{host}:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"{url}/figures", trust_env=False)
                break
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def client(url: str, tokens: int) -> GenerationClient:
    """Return a client configured as in the rollout process."""
    return GenerationClient(
        GenerateEndpoint(url, Access("key"), 600.0),
        ClientSettings(
            run="bench",
            max_new_tokens=tokens,
            temperature=1.0,
            stop_token_ids=[0],
            retry_timeout=60.0,
            coalesce=True,
        ),
    )


class Lag:
    """Lag of the event loop, sampled every 10 ms."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def watch(self) -> None:
        """Sample the lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            self.seconds.append(loop.time() - due)

    def quantile(self, share: float) -> float:
        """Return a quantile of the lag in milliseconds."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))] * 1e3


async def in_flight(url: str, count: int, tokens: int) -> dict[str, float]:
    """Measure `count` concurrent single-sample requests through the client."""
    made, lag = client(url, tokens), Lag()
    gc.collect()
    before, cpu = resident(), time.process_time()
    started = time.monotonic()
    tasks = [asyncio.ensure_future(made.generate(group=f"g{i:08d}")(PROMPT)) for i in range(count)]
    while len(made.inflight._sent) < count and not all(task.done() for task in tasks):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    at_once, opened = len(made.inflight._sent), time.monotonic() - started
    watching = asyncio.ensure_future(lag.watch())
    await asyncio.sleep(0.3 * opened)
    held = resident() - before
    found = await asyncio.gather(*tasks)
    watching.cancel()
    seconds = time.process_time() - cpu
    assert all(len(one.token_ids) == tokens for one in found)
    await made.close()
    return {
        "at_once": at_once,
        "cpu": seconds,
        "bytes": held / count,
        "p50": lag.quantile(0.5),
        "p99": lag.quantile(0.99),
    }


async def bare(url: str, count: int, tokens: int) -> dict[str, float]:
    """Measure the same with aiohttp only, which decodes the events as JSON and keeps their tokens."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, "n": 1}, "stream": True}
    decode = msgspec.json.Decoder().decode
    cpu = time.process_time()

    async def one(session: aiohttp.ClientSession) -> int:
        token_ids: list[int] = []
        async with session.post(f"{url}/generate", data=msgspec.json.encode(body)) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data != b"[DONE]":
                        token_ids += decode(data)["output_ids"]
        return len(token_ids)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        found = await asyncio.gather(*[one(session) for _ in range(count)])
    assert set(found) == {tokens}
    return {"cpu": time.process_time() - cpu}


async def answers(url: str, count: int, tokens: int) -> float:
    """Return the CPU seconds of `count` answers, requested one after the other."""
    made = client(url, tokens)
    await made.generate()(PROMPT)
    cpu = time.process_time()
    for _ in range(count):
        assert len((await made.generate()(PROMPT)).token_ids) == tokens
    seconds = time.process_time() - cpu
    await made.close()
    return seconds


def in_processes(processes: int, *, quick: bool) -> dict[str, float]:
    """Measure the rollout side with so many processes that play episodes (scripts/rollout_processes.py)."""
    with ExitStack() as stack:
        started = [stub(tokens=64, interval=8, pace=0.005) for _ in range(processes)]
        engines = [stack.enter_context(one) for one in started]
        return asyncio.run(rollout_processes.measure(engines, 64, 8 if quick else 64, 4 if quick else 12))


def buffer_process(*, tokens: int, record: bool, quick: bool) -> float:
    """Return the CPU time of the process with the buffer in microseconds for each sample of a group of 8, with real
    prompts and answers of so many tokens, played by two stubs (scripts/stub_player.py)."""
    steps = 8 if quick else 20
    found = rollout_processes.measure(["", ""], tokens, 64, steps, stubs=True, record=record)
    return asyncio.run(found)["cpu_us"]


def buffer_costs(console: Console, *, quick: bool) -> dict[str, float]:
    """Print the CPU time of the process with the buffer for each sample, and return it for samples of 1,000 tokens."""
    shapes = [(64, False), (1000, False), (1000, True)]
    costs = {shape: buffer_process(tokens=shape[0], record=shape[1], quick=quick) for shape in shapes}
    table = Table("tokens", "recorded", "µs a sample", title="process with the buffer, real prompts, groups of 8")
    for (size, record), cost in costs.items():
        table.add_row(f"{size}", "yes" if record else "no", f"{cost:.0f}")
    console.print(table)
    return {"buffer_cpu_us_per_sample": costs[1000, False], "recorded_cpu_us_per_sample": costs[1000, True]}


def held_in_processes(count: int, *, alone: bool) -> dict[str, float]:
    """Measure so many samples in flight at once: in groups of 8 that share a request, in four processes; or `alone`,
    each with a connection of its own, in as many processes as the limit of open files requires. Each has a stub engine
    on a loopback address of its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = -(-count // int(0.9 * files)) if alone else 4
    with ExitStack() as stack:
        started = [
            stub(tokens=64, interval=8, pace=16.0 if alone else 1.0, host=f"127.0.1.{number}")
            for number in range(1, processes + 1)
        ]
        engines = [stack.enter_context(one) for one in started]
        batch = -(-count // (3 * rollout_processes.SIZE))
        found = rollout_processes.measure(engines, 64, batch, 2, in_flight=True, coalesce=not alone)
        figures = asyncio.run(found)
        del figures["worker_cpu_us"]  # no request has ended
        return {"processes": processes, "open_files": files, **figures}


def buffer_seconds(groups: int) -> float:
    """Return the seconds per group from admission to its end, with `groups` groups in flight at any time."""
    buffer = CohortBuffer(groups // 10, 9)
    answer = Completion([1], [-0.5], [VersionSpan(0, 0, 1)], "stop")
    started, issued, ended = time.process_time(), 0, 0
    for version in range(1, 13):
        tickets = list(iter(buffer.admit, None))
        issued += len(tickets)
        for ticket in tickets:
            buffer.begin(ticket, ticket.uid, 1)
            buffer.commit(ticket, Group(ticket.uid, ticket.slot, PROMPT, [Trajectory([Turn([], answer)])], "bench"))
        assert buffer.take() is not None
        buffer.publish(version)
        buffer.books.ledger(issued, {"training": issued}, running=0, late=0).check()
        ended += groups // 10
    return (time.process_time() - started) / ended


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure, and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer trajectories")
    parser.add_argument("--in-flight", type=int, default=10_000, help="trajectories at once (default 10,000)")
    parser.add_argument("--buffer", action="store_true", help="measure the process with the buffer, and no more")
    parser.add_argument("--held", type=int, default=0, help="measure so many trajectories in flight, and no more")
    parser.add_argument("--alone", action="store_true", help="with --held: each trajectory has its own connection")
    options = parser.parse_args()
    this = machine.report()  # before this process is pinned to one core
    if options.held:
        print(json.dumps({**held_in_processes(options.held, alone=options.alone), "machine": this}))
        return
    if options.buffer:
        print(json.dumps({**buffer_costs(Console(), quick=options.quick), "machine": this}))
        return
    count = 500 if options.quick else options.in_flight
    tokens, interval = 64, 8
    pieces = tokens // interval
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.sched_setaffinity(0, {OWN_CORE})
    console = Console()
    with stub(tokens=tokens, interval=interval, pace=max(0.02, count / 10_000)) as url:
        bare_seconds = asyncio.run(bare(url, count, tokens))["cpu"]
        ours = asyncio.run(in_flight(url, count, tokens))
    with stub(tokens=LONG, interval=interval, pace=2e-5) as url:
        short, long = asyncio.run(answers(url, 32, LONG // 32)), asyncio.run(answers(url, 1, LONG))
    table = Table(
        "", "client", "bare aiohttp", title=f"{count} answers of {tokens} tokens in {pieces} pieces, one core"
    )
    table.add_row("in flight at once", f"{ours['at_once']:.0f}", "")
    table.add_row("CPU per request, µs", f"{ours['cpu'] / count * 1e6:.0f}", f"{bare_seconds / count * 1e6:.0f}")
    table.add_row(
        "CPU per piece, µs", f"{ours['cpu'] / count / pieces * 1e6:.0f}", f"{bare_seconds / count / pieces * 1e6:.0f}"
    )
    table.add_row("memory per trajectory, bytes", f"{ours['bytes']:.0f}", "")
    table.add_row("event-loop lag p50 / p99, ms", f"{ours['p50']:.1f} / {ours['p99']:.1f}", "")
    table.add_row("one answer of 32k tokens over 32 of 1k", f"{long / short:.2f}", "")
    console.print(table)
    sizes = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000)
    costs = {size: statistics.median(buffer_seconds(size) for _ in range(3)) for size in sizes}
    table = Table("groups under way", "µs a group", title="buffer")
    for size, seconds in costs.items():
        table.add_row(f"{size}", f"{seconds * 1e6:.1f}")
    console.print(table)
    rows = {number: in_processes(number, quick=options.quick) for number in (1, 2)}
    table = Table("processes that play", "CPU of the buffer's, µs a sample", "of a player's", "samples/s")
    for number, row in rows.items():
        played = f"{row['worker_cpu_us']:.0f}" if number > 1 else ""
        table.add_row(f"{number}", f"{row['cpu_us']:.0f}", played, f"{row['samples_per_s']:.0f}")
    console.print(table)
    buffers = buffer_costs(console, quick=options.quick)
    figures = {
        **buffers,
        "player_cpu_us_per_request": rows[2]["worker_cpu_us"],
        "in_flight": ours["at_once"],
        "cpu_us_per_request": ours["cpu"] / count * 1e6,
        "over_bare_client": ours["cpu"] / bare_seconds,
        "bytes_per_trajectory": ours["bytes"],
        "loop_lag_p99_ms": ours["p99"],
        "long_over_short": long / short,
        "buffer_growth": costs[sizes[-1]] / costs[sizes[0]],
    }
    print(json.dumps({**{name: round(value, 3) for name, value in figures.items()}, "machine": this}))


if __name__ == "__main__":
    main()
