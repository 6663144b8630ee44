"""Benchmark of the planner: how far the laws are off the simulation, how far the simulation is off a real rollout
process, and how fast the simulation is.

    python scripts/bench_planner.py [--quick] [--only laws clock events ...] [--settings N] [--scale N]
    python scripts/bench_planner.py --only events --engines 1024 --groups 977        a million groups
    python scripts/bench_planner.py --only run --run FOLDER                          a recorded run

laws: compared with the simulation on a seeded grid of splits, leads, bounds, lengths, tools and speeds, long enough for
the simulation's own noise to be small. clock: the simulation against the real rollout process and router with engines
that take the computed time (scripts/dilated_run.py); clock_error is the largest difference of tokens per second.
Requests cost the rollout process time that is not simulated, so it grows when time is scaled down more (--scale).
events: CPU time of fleets of 16 to 1,024 engines (--quick: 64) with the same number of groups per engine; an event is a
request, and growth_exponent is that of CPU time against the number of engines, where 1 is linear. run: a recorded run
is fitted, simulated in its own setting, and compared with what it did. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.fit import fit, in_words
from asyncrl.extensions.plan.laws import LengthSample, predict
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload, simulate
from scripts import machine

DEVICES = 8
CLOCK = [
    ("sigma 0.9", "bound 4", 16),
    ("sigma 0.9", "bound 8, lead 4", 16),
    ("sigma 0.9", "lead 0", 6),
    ("sigma 1.3", "bound 2", 16),
    ("slow tools", "bound 4", 12),
]
"""Workloads and modes of scripts/bench_async.py, and steps, in which the simulation is compared with the clock."""


def grid(count: int, seed: int = 0) -> Iterator[tuple[SimulatedWorkload, Setting]]:
    """Yield random workloads and settings on 8 devices."""
    draw = random.Random(seed)
    for _ in range(count):
        tools: Any = {"turns": 4.0, "tool_seconds": draw.choice([1.0, 5.0])} if draw.random() < 0.3 else {}
        lengths = Lengths(
            1000, draw.choice([0.3, 0.6, 0.9, 1.3]), draw.choice([4000, 8000]), draw.choice([4, 8]), **tools
        )
        engines, running = draw.randint(1, DEVICES - 1), draw.choice([16, 32, 64])
        bound = draw.choice([0, 1, 2, 4, 8])
        shape = EngineShape(0.012, 0.012 * draw.choice([0.3, 1, 2]) / running, running)
        rate = shape.rate(running) * draw.choice([0.3, 0.6, 1, 2]) * (DEVICES - engines)
        fixed, pause = draw.choice([0, 1, 5]), draw.choice([0, 1])
        lead = draw.randint(min(1, bound), bound)
        setting = Setting(engines, rate, bound, lead, train_fixed=fixed, pause=pause, in_play=0, shape=shape)
        yield SimulatedWorkload(lengths.episodes(), draw.choice([8, 16])), setting


def law_errors(count: int, steps: int) -> list[float]:
    """Return the relative differences between laws and simulation, sorted."""
    errors: list[float] = []
    for number, (workload, setting) in enumerate(grid(count)):
        if number and number % 20 == 0:
            print(f"laws: {number} of {count} settings, median {statistics.median(errors):.1%}", flush=True)
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


def laws(options: argparse.Namespace) -> dict[str, float]:
    """Compare the laws with the simulation."""
    errors = law_errors(options.settings or (12 if options.quick else 200), 60 if options.quick else 200)
    print(f"laws against simulation, {len(errors)} settings: worst {errors[-1]:.1%}", flush=True)
    return {
        "law_error_median": statistics.median(errors),
        "law_error_p90": errors[int(0.9 * len(errors))],
        "law_error_worst": errors[-1],
    }


def clock(options: argparse.Namespace) -> dict[str, float]:
    """Compare the simulation with the real rollout process and engines that take the computed time."""
    from scripts import bench_async  # imports the whole rollout process
    from scripts.dilated_run import DilatedRun

    errors = []
    modes = {mode.name: mode for mode in bench_async.MODES}
    for workload, mode, steps in CLOCK[:1] if options.quick else CLOCK:
        scale, steps = options.scale or (80 if options.quick else 40), 4 if options.quick else steps
        dilated, warm = (
            DilatedRun(bench_async.lengths(workload, scale), bench_async.BATCH),
            6 if modes[mode].max_staleness else 2,
        )
        try:
            setting, expected = bench_async.best_split(modes[mode], dilated.workload(), steps, warm, scale)
            duration = (steps + warm) * expected.step
            print(f"clock: {workload}, {mode}, {setting.engines} engines, about {duration:.0f} s", flush=True)
            measured = dilated.run(setting, steps, warm)
        finally:
            dilated.close()
        errors.append(expected.tokens_per_s / measured.tokens_per_s - 1)
        print(
            f"    tokens/s {expected.tokens_per_s:.0f} simulated, {measured.tokens_per_s:.0f} measured "
            f"({errors[-1]:+.1%}); trainer busy {expected.trainer_busy:.0%}, {measured.trainer_busy:.0%}; "
            f"staleness {expected.staleness_mean:.2f}, {measured.staleness_mean:.2f}",
            flush=True,
        )
    sizes = sorted(map(abs, errors))
    return {"clock_error": sizes[-1], "clock_error_median": statistics.median(sizes)}


def events(options: argparse.Namespace) -> dict[str, float]:
    """Measure the speed of the simulation."""
    fleets = options.engines or ((16, 64) if options.quick else (16, 64, 256, 1024))
    times = []
    for engines in fleets:
        seconds, requests = cpu_seconds(engines, options.groups)
        times.append(seconds)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{engines} engines: {requests} requests in {seconds:.2f} CPU s, {requests / seconds:.0f}/s; peak memory "
            f"of the process so far {memory:.2f} GiB",
            flush=True,
        )
    found = {"events_per_s": requests / seconds, "peak_gib": memory}
    if len(fleets) > 1:
        found["growth_exponent"] = math.log(times[-1] / times[0]) / math.log(fleets[-1] / fleets[0])
    return found


def run(options: argparse.Namespace) -> dict[str, float]:
    """Compare a recorded run with its simulation."""
    if not options.run:
        return {}
    found = fit(options.run)
    compared = found.compare()
    print("\n".join([in_words(compared), *found.notes]), flush=True)
    predicted, measured = compared["samples_per_s"]
    return {"run_error": predicted / measured - 1}


PARTS = {one.__name__: one for one in (laws, clock, events, run)}


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, smaller fleets, one setting of the clock")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--settings", type=int, help="settings of the grid (default 200, --quick 12)")
    parser.add_argument(
        "--scale", type=float, help="of the clock's time, as in bench_async.py (default 40, --quick 80)"
    )
    parser.add_argument("--engines", type=int, nargs="*", help="fleets that are simulated")
    parser.add_argument("--groups", type=int, default=60, help="simulated groups per engine (default 60)")
    parser.add_argument("--run", type=Path, help="folder of a recorded run")
    options = parser.parse_args()
    this = machine.report()
    found: dict[str, float] = {}
    for part in options.only:
        found |= PARTS[part](options)
    print(json.dumps({**{name: round(value, 4) for name, value in found.items()}, "machine": this}))


if __name__ == "__main__":
    main()
