"""Benchmark of the cost of multi-turn episodes, without the time of engines and tools.

    python scripts/bench_agents.py [--quick]

    engine_busy_over_ideal   ideal time / measured time of a run with a thousand concurrent episodes and log-normal tool
                             times (sigma 1.2). Measured: asyncrl's client, episode, agent and environments with a stub
                             engine that takes the time of a decode step. Ideal: a simulation in which only engine and
                             tools take time
    turns_per_s              turns per second in the measured run
    turn_overhead_us         processor time of a turn: episode, agent, chat template and environment, without an engine
    proxy_overhead_us        additional processor time of a call through the OpenAI proxy (scripts/bench_proxy.py)
    sandbox_start_ms         median time to take a warm sandbox; sandbox_cold_ms: to start one
    sandbox_call_ms          median time of /bin/true in a sandbox; sandbox_python_ms: of python -c pass

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from openai import AsyncOpenAI, DefaultAioHttpClient  # noqa: E402

from asyncrl.agents.chat import Chat  # noqa: E402
from asyncrl.agents.multi_turn import MultiTurn  # noqa: E402
from asyncrl.agents.template import ChatTemplate  # noqa: E402
from asyncrl.envs.env import EnvSpec, Step  # noqa: E402
from asyncrl.envs.pool import EnvironmentPool, PoolSettings  # noqa: E402
from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine, SimulatedRequest  # noqa: E402
from asyncrl.extensions.proxy.server import Proxy  # noqa: E402
from asyncrl.extensions.sandbox.local import LocalSandboxes  # noqa: E402
from asyncrl.models import tiny  # noqa: E402
from asyncrl.observability.intervals import Activity  # noqa: E402
from asyncrl.rollout.episode import Episode, EpisodeTimeouts  # noqa: E402
from asyncrl.rollout.parts import load_tokenizer  # noqa: E402
from asyncrl.schema import Prompt, Trajectory  # noqa: E402
from scripts import bench_proxy, bench_rollout, machine  # noqa: E402

PACE = 0.03  # seconds of a decode step
TOKENS, TURNS = 16, 4
TOOL_SECONDS, TOOL_SIGMA, TOOL_LONGEST = 1.0, 1.2, 30.0
LIMITS = EpisodeTimeouts(agent=600.0, reward=60.0, episode=None)


def tools(number: int) -> list[float]:
    """Return the seconds between the turns of an episode."""
    draw = random.Random(number)
    centre = -(TOOL_SIGMA**2) / 2
    return [min(TOOL_LONGEST, TOOL_SECONDS * draw.lognormvariate(centre, TOOL_SIGMA)) for _ in range(TURNS - 1)]


class Sleeping:
    """Environment whose tools only take time."""

    async def reset(self, question: dict[str, Any]) -> None:
        """Set the tool times of this episode."""
        self._seconds = list(question["seconds"])

    async def step(self, action: str) -> Step:
        """Wait for the duration of the tool."""
        if not self._seconds:
            return Step(done=True)
        await asyncio.sleep(self._seconds.pop(0))
        return Step("5")


async def score(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory unchanged, because the environment gives the reward."""
    return trajectory


def ideal(count: int, in_play: int) -> float:
    """Return the simulated seconds until all but the last `in_play` episodes have ended, if only engine and tools take
    time."""
    engine = SimulatedEngine(EngineShape(PACE, 1e-9, 1 << 20))
    waiting: list[tuple[float, int, list[float]]] = []
    running: dict[SimulatedRequest, tuple[int, list[float]]] = {}
    numbers, now, ended = iter(range(count)), 0.0, 0

    def ask(number: int, left: list[float]) -> None:
        job = SimulatedRequest(TOKENS)
        running[job] = (number, left)
        engine.submit(job, now)

    for _ in range(in_play):
        first = next(numbers)
        ask(first, tools(first))
    while ended < count - in_play:
        now = min(engine.next_time(), waiting[0][0] if waiting else float("inf"))
        for job in engine.advance(now):
            if job.finished:
                number, left = running.pop(job)
                if left:
                    heapq.heappush(waiting, (now + left[0], number, left[1:]))
                else:
                    ended += 1
                    fresh = next(numbers)
                    ask(fresh, tools(fresh))
        while waiting and waiting[0][0] <= now:
            _, number, left = heapq.heappop(waiting)
            ask(number, left)
    return now


async def measured(template: ChatTemplate, url: str, count: int, in_play: int) -> float:
    """Return the measured seconds until all but the last `in_play` episodes have ended."""
    setattr(Chat, "ended", False)  # noqa: B010  the stub ends all of its answers by length
    client, room = bench_rollout.client(url, TOKENS), asyncio.Semaphore(in_play)
    agent = MultiTurn(EnvironmentPool("bench", EnvSpec("scripts.bench_agents:Sleeping"), PoolSettings()))

    async def one(number: int) -> None:
        async with room:
            question: Any = {"messages": [{"role": "user", "content": str(number)}], "seconds": tools(number)}
            prompt = Prompt(f"p{number}", template.begin(question["messages"]), question, "bench")
            session = client.generate(group=f"g{number:08d}")
            found = await Episode(session, LIMITS, template).play(agent, prompt, score)
            assert len(found.turns) == TURNS
            ended.append(time.monotonic() - began)

    ended: list[float] = []
    began = time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    await agent.close()
    await client.close()
    return ended[count - in_play - 1]


async def turn_overhead(template: ChatTemplate, episodes: int) -> float:
    """Return the processor time of a turn in microseconds."""
    agent = MultiTurn(EnvironmentPool("bench", EnvSpec("scripts.bench_agents:Sleeping"), PoolSettings()))
    generate: Any = bench_proxy.Instant(template, TOKENS)
    question: Any = {"messages": [{"role": "user", "content": "5"}], "seconds": [0.0] * (TURNS - 1)}
    prompt = Prompt("p", template.begin(question["messages"]), question, "bench")

    class Session:
        """Session of an engine that costs no time."""

        trained_at = 1.0

        async def __call__(self, token_ids: list[int], *_: Any) -> Any:
            return await generate(token_ids)

        def trains(self, role: str) -> bool:
            """Return that every turn is trained."""
            return True

        def __init__(self) -> None:
            self.activity = Activity()

    session: Any = Session()
    began = time.process_time()
    for _ in range(episodes):
        await Episode(session, LIMITS, template).play(agent, prompt, score)
    return (time.process_time() - began) / (episodes * TURNS) * 1e6


async def proxy_overhead(template: ChatTemplate, episodes: int) -> float:
    """Return the microseconds of processor time that a proxy call takes in addition to a Chat call."""
    proxy = Proxy()
    proxy.start()
    async with AsyncOpenAI(base_url=proxy.base_url, api_key="x", http_client=DefaultAioHttpClient()) as client:
        bench = bench_proxy.Bench(template, TURNS, TOKENS, proxy, client)
        found = await bench.measure(bench.proxied, episodes) - await bench.measure(bench.chat, episodes)
    await proxy.close()
    return found


async def sandboxes(count: int) -> dict[str, float]:
    """Return the median times of sandboxes in milliseconds."""
    found: dict[str, list[float]] = {}

    async def timed(name: str, work: Any) -> Any:
        began = time.perf_counter()
        result = await work
        found.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        return result

    for name, warm in (("sandbox_cold_ms", 0), ("sandbox_start_ms", 4)):
        backend = LocalSandboxes(warm=warm)
        for _ in range(count):
            sandbox = await timed(name, backend.open())
            await timed("sandbox_call_ms", sandbox.run(["/bin/true"]))
            await timed("sandbox_python_ms", sandbox.run(["python3", "-c", "pass"]))
            await sandbox.close()
            await asyncio.sleep(0.3)  # the next sandbox starts meanwhile
        await backend.close()
    return {name: statistics.median(values) for name, values in found.items()}


async def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of everything")
    quick = parser.parse_args().quick
    this = machine.report()
    count, in_play = (400, 200) if quick else (3000, 1000)
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(Path(folder) / "tiny")
        template = ChatTemplate(load_tokenizer(Path(folder) / "tiny", None))
        with bench_rollout.stub(tokens=TOKENS, interval=TOKENS, pace=PACE) as url:
            best, seconds = ideal(count, in_play), await measured(template, url, count, in_play)
        print(f"{count} episodes of {TURNS} turns, {in_play} at once: {seconds:.1f} s; without our costs {best:.1f} s")
        figures = {
            "engine_busy_over_ideal": best / seconds,
            "turns_per_s": (count - in_play) * TURNS / seconds,
            "turn_overhead_us": await turn_overhead(template, 200 if quick else 1000),
            "proxy_overhead_us": await proxy_overhead(template, 24 if quick else 96),
            **await sandboxes(4 if quick else 20),
        }
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    print(json.dumps({**{name: round(value, 3) for name, value in figures.items()}, "machine": this}))


if __name__ == "__main__":
    asyncio.run(main())
