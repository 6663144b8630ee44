"""Benchmark of rollout.max_running_groups=auto against fixed numbers of episodes, in simulated time.

    python scripts/bench_concurrency.py [--quick]

It simulates very different workloads at the size of the published calibration of bench_async.py (engines of 12 ms +
0.12 ms per request, 32 groups of 16 or 8 answers per batch, bound 4). The rule under test is
asyncrl/extensions/congestion/window.py, and the simulation is asyncrl/extensions/plan. It prints a table and one line
of JSON. Results are exact and repeatable: it starts no process and reads no clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload, SimulationResult, simulate
from scripts import machine

BATCH, WARM = 32, 6
FIXED = (64, 128, 256, 512, 1024)
ANSWERS = Lengths(4000, 0.9, 27_000, 16)
AGENT = Lengths(6000, 0.9, 27_000, 8, turns=8, tool_seconds=10, tool_sigma=1.5)
TALKER = Lengths(1600, 0.9, 8_000, 8, turns=8, tool_seconds=10, tool_sigma=1.2)


@dataclass(frozen=True)
class World:
    """Parameters of one simulated workload."""

    episodes: Callable[[int], Sequence[SimulatedEpisode]]
    engines: int = 4
    kv_tokens: float = 200_000
    train_rate: float = 60_000
    bound: int = 4
    prompt: int = 500


def growing(steps: int) -> Callable[[int], Sequence[SimulatedEpisode]]:
    """Return a workload whose answers are eight times as long in the second half."""
    short, long = (Lengths(mean, 0.9, 54_000, 16).episodes() for mean in (1000, 8000))
    return lambda number: short(number) if number < BATCH * (WARM + steps // 2) else long(number)


def worlds(steps: int) -> dict[str, World]:
    """Return all workloads by name."""
    return {
        "small caches": World(ANSWERS.episodes()),
        "answers grow": World(growing(steps)),
        "caches for all": World(ANSWERS.episodes(), kv_tokens=2e6),
        "slow tools": World(AGENT.episodes(), engines=2, kv_tokens=300_000),
        "long contexts": World(TALKER.episodes(), engines=2, kv_tokens=400_000, prompt=12_000),
        "slow trainer": World(ANSWERS.episodes(), engines=6, kv_tokens=2e6, train_rate=10_000, bound=6),
    }


def played(world: World, in_play: int | None, steps: int) -> SimulationResult:
    """Simulate one run; with `in_play=None` the rule sets the number of episodes."""
    setting = Setting(
        world.engines,
        world.train_rate,
        world.bound,
        train_fixed=6.0,
        pause=3.0,
        in_play=in_play,
        shape=EngineShape(0.012, 0.00012, 256, world.kv_tokens, 25_000.0),
    )
    return simulate(SimulatedWorkload(world.episodes, BATCH, prompt=world.prompt, longest=32_768), setting, steps, WARM)


def main() -> None:
    """Simulate, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 6 if parser.parse_args().quick else 20
    this = machine.report()
    names = ["auto", "all", *map(str, FIXED)]
    table = Table("tokens/s (in play; prefilled per token trained; staleness)", *names)
    figures = {}
    for name, world in worlds(steps).items():
        found = [played(world, number, steps) for number in (None, 0, *FIXED)]
        auto, everything, best = found[0], found[1], max(found[1:], key=lambda one: one.tokens_per_s)
        table.add_row(
            name,
            *(
                f"{one.tokens_per_s:.0f} ({one.in_play:.0f}; {one.prefilled:.2f}; {one.staleness_mean:.1f})"
                for one in found
            ),
        )
        figures[name] = {
            "auto_over_best_fixed": round(auto.tokens_per_s / best.tokens_per_s, 3),
            "auto_over_all": round(auto.tokens_per_s / everything.tokens_per_s, 3),
            "prefilled_over_all": round(auto.prefilled / everything.prefilled, 3),
            "staleness_over_all": round(auto.staleness_mean / everything.staleness_mean, 3),
        }
    Console(width=200).print(table)
    print(json.dumps({**figures, "machine": this}))


if __name__ == "__main__":
    main()
