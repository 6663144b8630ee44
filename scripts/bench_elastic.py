"""Benchmark of elastic runs: the controller of plan.elastic against the best fixed split in hindsight.

    python scripts/bench_elastic.py [--quick] [--parts drift stationary engines stubs]

drift        8 devices, answers that grow fourfold; devices move between engines and trainer, which then stands still
stationary   the same devices, lengths that do not change
engines      answers that grow fourfold; the trainer keeps its devices, and engines join and leave
stubs        asyncrl-train with stub engines and a trainer that sleeps: one engine, four, and plan.elastic=act, where
             engines join as processes

All but the last are simulated (scripts/elastic_simulation.py), under seeds; "naive" is the fixed split that is best for
the lengths of the start. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.extensions.plan.elastic import ElasticLimits
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload
from asyncrl.jsonl import Tail
from scripts import machine
from scripts.elastic_simulation import ElasticResult, simulate_elastic

ROOT = Path(__file__).parent.parent
DEVICES, BATCH, BOUND = 8, 16, 8
SHAPE = EngineShape(0.012, 0.0002, 64, kv_tokens=30_000)
TRAIN_RATE = 900.0
"""Tokens per second and device of the trainer."""
MOVE, JOIN = 60.0, 60.0
"""Seconds for which the trainer stands still when devices move, and until an engine that is added serves."""
STUBS = 4
"""Most stub engines."""
GROWTH = {"drift": 4.0, "stationary": 1.0, "engines": 4.0}


def play(part: str, growth: float, engines: int, steps: int, seed: int, *, elastic: bool = False) -> ElasticResult:
    """Simulate a run with a fixed number of engines, or with one that the controller changes."""
    lengths = Lengths(1000, 0.9, 32_000, 8, growth=growth, growth_groups=steps * BATCH, seed=seed)
    workload = SimulatedWorkload(lengths.episodes(), BATCH, longest=32_000)
    moves = part != "engines"
    rate = TRAIN_RATE * (DEVICES - engines if moves else DEVICES / 2)
    setting = Setting(engines, rate, BOUND, train_fixed=1.0, pause=1.0, in_play=0, shape=SHAPE)
    limits = ElasticLimits(1, DEVICES - 1, devices=DEVICES if moves else 0, move_seconds=MOVE if moves else 0.0)
    return simulate_elastic(workload, setting, steps, limits if elastic else None, JOIN)


def compared(part: str, steps: int, seed: int) -> dict[str, float]:
    """Compare the controller with every fixed number of engines."""
    counts = range(1, DEVICES)
    fixed = {engines: play(part, GROWTH[part], engines, steps, seed) for engines in counts}
    start = {engines: play(part, 1.0, engines, steps // 2, seed).tokens_per_s for engines in counts}
    naive = min(engines for engines in counts if start[engines] > 0.98 * max(start.values()))
    moved = play(part, GROWTH[part], naive, steps, seed, elastic=True)
    best = max(fixed, key=lambda engines: fixed[engines].tokens_per_s)
    of = fixed[best].tokens_per_s
    for one in moved.decisions:
        print(f"    {one.reason} (step {one.step})", flush=True)
    return {
        "elastic": moved.tokens_per_s,
        "best_engines": best,
        "of_best": moved.tokens_per_s / of,
        "naive_engines": naive,
        "naive_of_best": fixed[naive].tokens_per_s / of,
        "engine_seconds_of_best": moved.engine_seconds / fixed[best].engine_seconds,
        "decisions": len(moved.decisions),
        "staleness_max": moved.staleness_max,
    }


def stubs(steps: int) -> dict[str, float]:
    """Run asyncrl-train with stub engines while answers grow fourfold: with one engine, with all from the start, and
    elastic."""
    found: dict[str, float] = {}
    for name, mode, engines in (("one", "off", 1), ("all", "off", STUBS), ("elastic", "act", 1)):
        with tempfile.TemporaryDirectory() as folder:
            metrics, decisions, ledger = _stub_run(Path(folder), mode, engines, steps)
        tokens = [step["tokens/trained"] / step["time/step"] for step in metrics]
        for one in decisions:
            at = one["step"]
            before, after = (
                statistics.fmean(tokens[max(0, at - 5) : at]),
                statistics.fmean(tokens[at + 4 : at + 9] or tokens[-1:]),
            )
            print(f"    step {at}: {one['reason']}; {before:.0f} -> {after:.0f} tokens/s; {one['done']}", flush=True)
        seconds = sum(step["time/step"] for step in metrics)
        found[f"tokens_per_s_{name}"] = sum(step["tokens/trained"] for step in metrics) / seconds
        found[f"engines_{name}"] = metrics[-1]["engines/serving"]
        found[f"lost_groups_{name}"] = (
            ledger["groups"]["trained"] - steps * 8 + sum(ledger["groups"]["rejected"].values())
        )
        print(f"  {name}: {found[f'tokens_per_s_{name}']:.0f} tokens/s", flush=True)
    return found


def _stub_run(
    folder: Path, mode: str, engines: int, steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """Return metrics, decisions and ledger of a run whose trainer is as fast as about three engines at the start."""
    from tests.integration.workload import Workload  # the stubs of asyncrl-train's own processes

    lengths = Lengths(10.0, 0.5, 48, 4)
    workload = Workload(
        asdict(lengths), 0.02, [0.0] * STUBS, 0.1, 0.001, per_request=0.001, max_running=8, growth=(4.0, float(steps))
    )
    rows = [{"prompt": f"{number:03}", "answer": f"{number:03}"} for number in range(1000)]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = {
        "run.dir": folder / "run",
        "run.max_steps": steps,
        "plan.elastic": mode,
        "engine.count": engines,
        "plan.max_engines": STUBS,
        "cluster.tls": "false",
        "rollout.batch_groups": 8,
        "rollout.group_size": 4,
        "rollout.max_staleness": 2,
        "rollout.max_running_groups": "null",
        "rollout.max_new_tokens": 48,
        "weights.verify": "false",
        "task": "file",
        "task.train_file": questions,
        "eval.questions": 0,
        "metrics.console": "false",
    }
    words = [f"{name}={value}" for name, value in overrides.items()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **workload.environment()}
    command = [sys.executable, "-m", "tests.integration.stub_run", "experiment=tiny", *words]
    subprocess.run(command, env=env, cwd=folder, check=True)
    run = folder / "run"
    return (
        _lines(run / "metrics.jsonl"),
        _lines(run / "elastic.jsonl"),
        json.loads((run / "summary.json").read_text())["ledger"],
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return Tail(path)()


def measured(parts: Sequence[str], *, quick: bool) -> Iterator[tuple[str, float]]:
    """Print a row for each part, and yield its figures."""
    for part in parts:
        print(f"{part}:", flush=True)
        if part == "stubs":
            yield from ((f"stubs_{name}", value) for name, value in stubs(16 if quick else 120).items())
            continue
        steps, seeds = (100, 1) if quick else (200, 5)
        rows = [compared(part, steps, seed) for seed in range(seeds)]
        for name in rows[0]:
            values = [row[name] for row in rows]
            print(f"  {name}: {', '.join(f'{value:.3g}' for value in values)}", flush=True)
            yield f"{part}_{name}", statistics.fmean(values)
        yield f"{part}_of_best_lowest", min(row["of_best"] for row in rows)


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, half the steps; stubs: 16 steps")
    names = [*GROWTH, "stubs"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="parts to run (default: all)")
    options = parser.parse_args()
    this = machine.report()
    found = dict(measured(options.parts, quick=options.quick))
    print(json.dumps({**{name: round(value, 4) for name, value in found.items()}, "machine": this}))


if __name__ == "__main__":
    main()
