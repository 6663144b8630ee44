"""Benchmark of adapters (trainer.lora) against training all weights, and of the two ways of publishing them.

    python scripts/bench_lora.py [--quick] [--steps N] [--only trainer publish runs]

Real parts throughout, SmolLM2-135M (--quick: the tiny model, few steps). `trainer` makes steps of one rank in processes
of their own; `publish` sends versions to a real engine while requests stream from it; `runs` are whole runs of
asyncrl-train. Ratios compare measurements of this run. The last line is JSON:

    train_over_full          trained tokens per CPU-second with adapters of rank 16 / with all weights trained
    state_over_full          bytes of parameters, gradients, masters and moments / the same with all weights trained
    nf4_over_bf16            bytes of the base's quantized linear layers / the same in bfloat16
    int8_over_bf16           the same with trainer.lora.base=int8
    peak_rss_over_full       peak memory of the trainer's process, over that with all weights trained
    publish_bytes_over_full  bytes of one version's adapter / of all weights
    publish_ms_over_full     time from the beginning of a publish to its announcement / with all weights
    stall_ms                 longest gap between two chunks of a running stream from the beginning of a publish to the
                             end of the first answer of the new version, less the usual gap; median of the publishes
    stall_ms_merged          the same where the version is sent as merged weights
    samples_per_s_over_merged  rates of asynchronous runs with weights.lora=versions / merged, by rollout.max_staleness
    staleness                mean staleness of both, by the same bounds
    gap_over_full            mean log-probability gap between engine and trainer in a synchronous run / in one of full
                             training
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from scripts import machine  # noqa: E402

RANK = 16
PARTS = ("trainer", "publish", "runs")
BASES = {"full": [], "lora": [f"trainer.lora.rank={RANK}"]} | {
    kind: [f"trainer.lora.rank={RANK}", f"trainer.lora.base={kind}"] for kind in ("int8", "nf4")
}
DEADLINE = 3600.0
"""Time limit of one process in seconds."""


# --- a step of one rank, in a process of its own ------------------------------------------------------------


def trainer_case(kind: str, quick: bool) -> dict[str, float]:
    """Return the CPU-seconds of a step, the bytes of its state, and the peak memory."""
    from asyncrl.models import catalog
    from scripts.bench_train import Model, Shape, cpu_seconds, groups_of, peak_memory

    folder = catalog.resolve("builtin:tiny" if quick else "builtin:smollm2-135m")
    model = Model(folder, "bfloat16", *BASES[kind])
    import torch

    from asyncrl.algo.pack import pack
    from asyncrl.extensions.qlora.packed import PackedWeight

    groups = groups_of(Shape("64/64", 64, 64, 16), 8, model.network.hf["vocab_size"])
    samples = [sample for group in groups for sample in group]
    weights = torch.zeros(samples[-1].first_row + samples[-1].num_trained + 1)
    weights[: samples[-1].first_row] = 1 / len(weights)
    packs = [pack([group]) for group in groups]
    model.step(packs, weights)
    seconds = min(cpu_seconds(lambda: model.step(packs, weights)) for _ in range(3))
    modules = [one for chunk in model.network.wrapped for one in chunk.module.modules()]
    tensors = [*model.network.gradients(), *model.optimizer.states()]
    tensors += [tensor for one in modules for tensor in (*one.parameters(False), *one.buffers(False))]
    packed = [one for one in modules if isinstance(one, PackedWeight)]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {
        "step": seconds,
        "state": float(sum(stored.values())),
        "packed": float(sum(one.nbytes for one in packed)),
        "in_bfloat16": float(sum(2 * one.shape.numel() for one in packed)),
        "memory": float(peak_memory()),
    }


def trainer_figures(quick: bool) -> dict[str, Any]:
    """Measure a step of each kind."""
    found: dict[str, dict[str, float]] = {}
    for kind in BASES:
        command = [sys.executable, __file__, "--case", kind, *(["--quick"] if quick else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    full, lora = found["full"], found["lora"]
    return {
        "train_over_full": full["step"] / lora["step"],
        "state_over_full": lora["state"] / full["state"],
        "peak_rss_over_full": lora["memory"] / full["memory"],
        **{f"{kind}_over_bf16": found[kind]["packed"] / found[kind]["in_bfloat16"] for kind in ("nf4", "int8")},
    }


# --- publishes while requests stream ------------------------------------------------------------------------


class Gaps:
    """Arrival times of the chunks of running streams."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self.found: list[tuple[float, float]] = []  # end and length of each gap

    def watch(self, session: Any) -> None:
        """Note the chunks of a session."""
        hear = session.hear

        def heard(tokens: int) -> None:
            now = time.monotonic()
            if id(session) in self._last:
                self.found.append((now, now - self._last[id(session)]))
            self._last[id(session)] = now
            hear(tokens)

        session.hear = heard

    def stall(self, began: float, ended: float) -> float:
        """Return the longest gap that ended in this time, less the usual one, in seconds."""
        inside = [length for end, length in self.found if began <= end <= ended]
        outside = [length for end, length in self.found if not began <= end <= ended]
        return max(inside, default=0.0) - statistics.median(outside)


async def publishes(client: Any, publish: Callable[[int], Awaitable[Any]], count: int) -> dict[str, float]:
    """Publish versions while eight streams run; after each, play one answer with the new version."""
    draw, gaps, stop = random.Random(0), Gaps(), asyncio.Event()

    def prompt() -> list[int]:
        return [draw.randrange(1, 10) for _ in range(16)]

    async def stream() -> None:
        while not stop.is_set():
            session = client.generate()
            gaps.watch(session)
            await session(prompt())

    await publish(1)
    running = asyncio.gather(*[stream() for _ in range(8)])
    windows, seconds, size = [], [], 0.0
    for version in range(2, count + 2):
        await asyncio.sleep(1.5)
        began = time.monotonic()
        figures = await publish(version)
        seconds.append(time.monotonic() - began)
        size = figures["bytes"]
        await client.generate()(prompt(), 4)
        windows.append((began, time.monotonic()))
    await asyncio.sleep(1.0)
    stop.set()
    await running
    stalls = [gaps.stall(*window) for window in windows]
    return {"bytes": size, "publish": statistics.median(seconds), "stall": statistics.median(stalls)}


def publish_figures(quick: bool) -> dict[str, Any]:
    """Publish adapters, and the same number of times all weights."""
    versions, merged = (published(way, quick) for way in ("versions", "merged"))
    return {
        "publish_bytes_over_full": versions["bytes"] / merged["bytes"],
        "publish_ms_over_full": versions["publish"] / merged["publish"],
        "stall_ms": versions["stall"] * 1e3,
        "stall_ms_merged": merged["stall"] * 1e3,
    }


def published(way: str, quick: bool) -> dict[str, float]:
    """Publish to one engine in one way."""
    import torch

    from asyncrl.engine.client import ClientSettings, GenerationClient
    from asyncrl.engine.served import InUse
    from asyncrl.engine.stream import GenerateEndpoint
    from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
    from tests.integration import adapters, publisher
    from tests.integration.fleet import engines

    torch.set_num_threads(1)
    settings = [f"trainer.lora.rank={RANK}", "engine.stream_interval=1", "engine.max_total_tokens=16384"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-lora-")))
        started = engines(folder, f"weights.lora={way}", *settings, experiment="tiny" if quick else "count_bits")
        fleet = stack.enter_context(started)
        config, addresses = fleet.config, fleet.addresses

        async def play() -> dict[str, float]:
            loop = asyncio.get_running_loop()
            client = GenerationClient(
                GenerateEndpoint(addresses.router, addresses.access, 120.0),
                ClientSettings(
                    run="bench",
                    max_new_tokens=48,
                    temperature=1.0,
                    stop_token_ids=[],
                    retry_timeout=60.0,
                    coalesce=False,
                ),
                served=ServedAdapters(names=adapter_names(config, "bench")),
            )

            async def announced(version: int) -> InUse:
                client.inflight.release(version)
                return client.inflight.served.in_use(version)

            def announce(version: int) -> InUse:
                return asyncio.run_coroutine_threadsafe(announced(version), loop).result(60)

            def hold() -> None:
                loop.call_soon_threadsafe(client.inflight.hold)

            made: Any
            if way == "versions":
                adapter = adapters.SeededAdapters(fleet)
                begun = adapters.publisher_of(config, addresses, adapter, folder, run="bench", announce=announce)
                made = stack.enter_context(begun)
                send = partial(adapters.publish, made, adapter)
            else:
                weights = publisher.SeededWeights(addresses.model, share=1e-3)
                made = publisher.make(config, addresses, weights, folder, hold=hold, announce=announce)
                send = partial(publisher.publish, made)
            try:
                return await publishes(client, lambda version: asyncio.to_thread(send, version), 3 if quick else 8)
            finally:
                await client.close()

        return asyncio.run(play())


# --- whole runs ---------------------------------------------------------------------------------------------


def run_once(*settings: str) -> dict[str, Any]:
    """Run asyncrl-train. Return its summary, with the mean staleness of the steps."""
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        command = [sys.executable, "-m", "asyncrl.launch.main", f"run.dir={folder}/run", *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        staleness = statistics.mean(json.loads(line)["staleness/mean"] for line in lines)
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return {**summary, "staleness": staleness}


def run_figures(quick: bool, steps: int) -> dict[str, Any]:
    """Compare runs whose versions are adapters with runs that publish merged weights."""
    shape = ["experiment=tiny" if quick else "experiment=lora", f"run.max_steps={steps}", "eval.questions=0"]
    lora = [*shape, f"trainer.lora.rank={RANK}"]
    rates, staleness = {}, {}
    for bound in (1,) if quick else (1, 2, 4):
        found = {
            way: run_once(*lora, f"weights.lora={way}", f"rollout.max_staleness={bound}")
            for way in ("versions", "merged")
        }
        rates[bound] = round(found["versions"]["samples_per_s"] / found["merged"]["samples_per_s"], 3)
        staleness[bound] = [round(found[way]["staleness"], 3) for way in ("versions", "merged")]
    synchronous = ["rollout.max_staleness=0", f"run.max_steps={min(steps, 8)}"]
    gap, of_full = (
        run_once(*shape, *synchronous, *settings)["logprob_gap/mean"]
        for settings in ([f"trainer.lora.rank={RANK}", "weights.lora=versions"], ["trainer.lora.rank=null"])
    )
    return {
        "samples_per_s_over_merged": rates,
        "staleness": staleness,
        "gap_over_full": gap / of_full,
    }


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model, and few steps")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--case", choices=BASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(trainer_case(options.case, options.quick)))
        return
    this = machine.report()
    figures: dict[str, Any] = {}
    if "trainer" in options.only:
        figures |= trainer_figures(options.quick)
    if "publish" in options.only:
        figures |= publish_figures(options.quick)
    if "runs" in options.only:
        figures |= run_figures(options.quick, 6 if options.quick else options.steps)
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    Console(width=120).print(table)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({**rounded, "quick": options.quick, "machine": this}))


if __name__ == "__main__":
    main()
