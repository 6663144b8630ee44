"""Benchmark of the planner: how far the laws are off the simulation, and how fast the simulation is.

    python scripts/bench_planner.py [--quick] [--settings N] [--groups N]

The laws are compared with the simulation on a seeded grid of splits, leads, bounds, lengths, tools and speeds, long
enough for the simulation's own noise to be small. The simulation's CPU time is measured for fleets of 16 to 1,024
engines (--quick: 64) with the same number of groups per engine. An event is a request; growth_exponent is that of CPU
time against the number of engines, where 1 is linear. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.planner.engine import EngineShape
from asyncrl.planner.laws import LengthSample, predict
from asyncrl.planner.lengths import Lengths
from asyncrl.planner.simulation import Setting, SimulatedWorkload, simulate
from scripts import machine

DEVICES = 8


def grid(count: int, seed: int = 0) -> Iterator[tuple[SimulatedWorkload, Setting]]:
    """Yield random workloads and settings on 8 devices."""
    draw = random.Random(seed)
    for _ in range(count):
        tools = {"turns": 4.0, "tool_seconds": draw.choice([1.0, 5.0])} if draw.random() < 0.3 else {}
        lengths = Lengths(
            1000, draw.choice([0.3, 0.6, 0.9, 1.3]), draw.choice([4000, 8000]), draw.choice([4, 8]), **tools
        )
        engines, running = draw.randint(1, DEVICES - 1), draw.choice([16, 32, 64])
        bound = draw.choice([0, 1, 2, 4, 8])
        shape = EngineShape(0.012, 0.012 * draw.choice([0.3, 1, 2]) / running, running)
        rate = shape.rate(running) * draw.choice([0.3, 0.6, 1, 2]) * (DEVICES - engines)
        fixed, pause = draw.choice([0, 1, 5]), draw.choice([0, 1])
        lead = draw.randint(min(1, bound), bound)
        setting = Setting(engines, rate, bound, lead, fixed, pause, in_play=0, shape=shape)
        yield SimulatedWorkload(lengths.episodes(), draw.choice([8, 16])), setting


def law_errors(count: int, steps: int) -> list[float]:
    """Return the relative differences between laws and simulation, sorted."""
    errors = []
    for workload, setting in grid(count):
        warm = 4 + 2 * setting.max_staleness
        sample = LengthSample.of(workload.episodes, min(2048, (steps + warm) * workload.batch_groups))
        law = predict(sample, workload, setting)
        errors.append(abs(law.tokens_per_s / simulate(workload, setting, steps, warm).tokens_per_s - 1))
    return sorted(errors)


def cpu_seconds(engines: int, groups: int) -> tuple[float, int]:
    """Return the CPU seconds of simulating so many groups per engine at bound 4, and the number of requests."""
    lengths, requests = Lengths(1000, 0.9, 8000, 4), 0
    draw = lru_cache(maxsize=1)(lengths.group)

    def episodes(number: int) -> list:
        nonlocal requests
        requests += lengths.group_size
        return draw(number)

    batch, shape = 4 * engines, EngineShape(0.012, 0.0002, 64)
    setting = Setting(engines, engines * shape.rate(64), 4, in_play=0, shape=shape)
    began = time.process_time()
    simulate(SimulatedWorkload(episodes, batch), setting, max(2, groups // 4 - 5), 1)
    return time.process_time() - began, requests


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, smaller fleets")
    parser.add_argument("--settings", type=int, help="settings of the grid (default 200, --quick 20)")
    parser.add_argument("--groups", type=int, default=60, help="simulated groups per engine (default 60)")
    options = parser.parse_args()
    this = machine.report()
    errors = law_errors(options.settings or (20 if options.quick else 200), 60 if options.quick else 200)
    print(f"laws against simulation, {len(errors)} settings: worst {errors[-1]:.1%}", flush=True)
    fleets = (16, 64) if options.quick else (16, 64, 256, 1024)
    times = []
    for engines in fleets:
        seconds, requests = cpu_seconds(engines, options.groups)
        times.append(seconds)
        print(f"{engines} engines: {requests} requests in {seconds:.2f} CPU s, {requests / seconds:.0f}/s", flush=True)
    found = {
        "law_error_median": statistics.median(errors),
        "law_error_p90": errors[int(0.9 * len(errors))],
        "law_error_worst": errors[-1],
        "events_per_s": requests / seconds,
        "growth_exponent": math.log(times[-1] / times[0]) / math.log(fleets[-1] / fleets[0]),
    }
    print(json.dumps({**{name: round(value, 4) for name, value in found.items()}, "machine": this}))


if __name__ == "__main__":
    main()
