"""Synchronous against asynchronous, on the same configuration in one go.

    python scripts/bench_async.py [--quick] [--runs N] [OVERRIDE ...]

Runs `experiment=count_bits` (8 prompts x 8 samples of at most 6 tokens) with rollout.max_staleness=0 and then with the
configured bound, N times in turn, and prints the medians. The first steps of each run are left out: they consume what
was generated while the trainer started. --quick takes the tiny model and few steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

FIGURES = ("samples_per_s", "step_s", "trainer_idle", "engine_busy", "publish_share", "pause_s")


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny model, few steps, one run of each")
    parser.add_argument("--runs", type=int, default=3, help="runs of each mode (default 3)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default 40)")
    parser.add_argument("overrides", nargs="*", help="further settings of asyncrl-train, for both modes")
    arguments = parser.parse_args()
    experiment, runs, steps = ("tiny", 1, 60) if arguments.quick else ("count_bits", arguments.runs, arguments.steps)
    settings = [f"experiment={experiment}", f"run.max_steps={steps}", "eval.questions=0", *arguments.overrides]
    found: dict[str, list[dict[str, float]]] = {"lead 0": [], "async": []}
    for _ in range(runs):
        found["lead 0"].append(measure([*settings, "rollout.max_staleness=0", "rollout.lead=null"]))
        found["async"].append(measure(settings))
    medians = {
        mode: {name: statistics.median(run[name] for run in of_mode) for name in FIGURES}
        for mode, of_mode in found.items()
    }
    table = Table("", *medians, title=f"{experiment}: medians of {runs} run(s) of {steps} steps")
    for name in FIGURES:
        table.add_row(name, *(f"{figures[name]:.3f}" for figures in medians.values()))
    Console().print(table)
    ratio = medians["async"]["samples_per_s"] / medians["lead 0"]["samples_per_s"]
    print(
        json.dumps(
            {"async_over_lead0": round(ratio, 3), **{name: round(value, 4) for name, value in medians["async"].items()}}
        )
    )


def measure(settings: list[str]) -> dict[str, float]:
    """One run's figures, from its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "asyncrl.launch.main",
            f"run.dir={run_dir}",
            "metrics.tensorboard=false",
            *settings,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = steps[len(steps) // 4 :]
    seconds = sum(step["time/step"] for step in steady)
    return {
        "samples_per_s": sum(step["samples/generated"] for step in steady) / seconds,
        "step_s": seconds / len(steady),
        "trainer_idle": sum(step["time/wait_batch"] for step in steady) / seconds,
        "engine_busy": sum(step["time/engine_busy"] for step in steady) / seconds,
        "publish_share": sum(step["time/publish"] for step in steady) / seconds,
        "pause_s": statistics.fmean(step["time/pause"] for step in steady),
    }


if __name__ == "__main__":
    main()
