"""Benchmark of a first use: time of `--help`, of start-up and of the default run, and the error of the time estimate.

    python scripts/bench_start.py [--quick] [--hide-bfloat16] [SETTING=VALUE ...]

It times the commands as a user runs them, each in its own process. `--quick` shortens the default run to four steps and
eight evaluation questions. `--hide-bfloat16` hides AVX-512 and AMX from torch and oneDNN, so that a newer machine
behaves like one with AVX2 only. It prints a table and one line of JSON:

    help_s          asyncrl-train --help, median of 5
    start_up_s      time from the command to the first batch, including the first evaluation
    default_run_s   time from the command to its end
    estimate_error  the launcher's estimate of the run over its real time, minus 1
    accuracy        accuracy on held-out questions, before and after
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts import machine  # noqa: E402

QUICK = ["run.max_steps=4", "eval.questions=8"]
HIDDEN = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Instruction sets to which torch's own kernels and oneDNN are limited."""
DEADLINE = 3600.0
"""Time limit of the default run in seconds."""


def command(*arguments: str) -> list[str]:
    """Return the command of asyncrl-train in this environment."""
    return [sys.executable, "-m", "asyncrl.launch.main", *arguments]


def help_seconds(env: dict[str, str], runs: int = 5) -> float:
    """Return the median time of --help."""
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run(command("--help"), env=env, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def default_run(env: dict[str, str], settings: list[str]) -> dict[str, Any]:
    """Run the default run in a temporary folder. Return its summary and the time of the whole command."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-start-") as folder:
        began = time.perf_counter()
        subprocess.run(command(f"run.dir={folder}/run", *settings), env=env, check=True, timeout=DEADLINE)
        seconds = time.perf_counter() - began
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return {**summary, "command": seconds}


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four steps")
    parser.add_argument("--hide-bfloat16", action="store_true", help="as on a CPU with AVX2 alone")
    parser.add_argument("settings", nargs="*", help="further settings of asyncrl-train")
    options = parser.parse_args()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if options.hide_bfloat16:
        env |= HIDDEN
    this = machine.report()
    helped = help_seconds(env)
    summary = default_run(env, [*(QUICK if options.quick else []), *options.settings])
    figures = {
        "default_run_s": summary["command"],
        "start_up_s": summary["time/start_up"],
        "help_s": helped,
        "estimate_error": summary.get("estimate/error"),
    }
    facts = {
        "steps": summary["steps"],
        "step_s": summary["step_time/median"],
        "accuracy": [summary["accuracy/before"], summary["accuracy/after"]],
        **{name: summary[name] for name in ("dtype/trainer", "dtype/engine")},
    }
    table = Table(show_header=False, box=None)
    for name, value in {**figures, **facts}.items():
        table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    Console(width=120).print(table)
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({**rounded, **facts, "quick": options.quick, "hidden": options.hide_bfloat16, "machine": this}))


if __name__ == "__main__":
    main()
