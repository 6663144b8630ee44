"""Benchmark of asynchronous against synchronous training, compared with a bound and a simulation.

    python scripts/bench_async.py [--full | --quick] [--workloads NAME ...] [--modes NAME ...] [--steps N] [--scale N]
    python scripts/bench_async.py --real [--quick] [--steps N] [OVERRIDE ...]

By default the engines are time-dilated stubs (scripts/dilated_run.py) with a published calibration, scaled down in
state and time. There are 8 devices, each an engine or an eighth of the trainer, and 16 groups of 8 answers per batch.
Lengths are those of reasoning models (log-normal, sigma 0.9), with a heavier tail (1.3), or of an agent with slow
tools; with --full also with dynamic sampling that rejects half of the groups. Prefills take no time. The baseline is
colocated: all devices generate, then all train, and switching costs time. Each mode uses the split of devices that is
fastest in the simulation; all modes train on the same groups. Time is scaled down by --scale (default 80). The cost of
asyncrl per request is not scaled, so it weighs more than in a real run. Each row is printed as soon as its run has
ended. By
default there are few modes and steps, which take about ten minutes; --full runs all modes, for more than an hour.
A second table says how long engines and trainer stand still for publishes, and what happens to the requests in flight;
the modes `stream`, `full` and `overlap` publish a large model.

--real runs `experiment=count_bits` (8 prompts x 8 samples of at most 6 tokens) on the real engine and trainer instead,
alternately with rollout.max_staleness=0 and with the configured bound, three times each. It prints the ratio and the
largest ratio that this machine allows, computed from the times of the synchronous runs and from the rate of two
processes over that of one (scripts/machine.py, overlap_bound). --quick uses fewer steps, one workload and the tiny
model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.config import Config, read
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.laws import bottleneck_bound
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedWorkload, SimulationResult, simulate
from asyncrl.launch.machine import count_gpus
from scripts import machine
from scripts.dilated_run import DilatedRun, Measured

COLUMNS = ("", "engines", "tokens/s", "x colocated", "simulated", "of the bound", "staleness, mean and max")
ROW = "{:33} {:>7} {:>8} {:>11} {:>14} {:>12} {:>23}"
STILL_COLUMNS = ("publishes", "engines still", "trainer still", "waits for batch", "in flight", "crossing", "repeated")
STILL_ROW = "{:33} {:>14} {:>14} {:>15} {:>10} {:>9} {:>9}"
FIGURES = (
    "samples_per_s",
    "step_s",
    "generate_s",
    "train_s",
    "trainer_idle",
    "engine_busy",
    "publish_share",
    "pause_s",
    "processes",
)

# The calibration: 32 devices of 12 ms + 0.12 ms a request and 256 requests, 10,000 tokens/s each in training, 6 s a
# step, 3 s a publish, 15 s from generating to training and back; 128 groups of 16 answers of 8,000 tokens. Here a
# device stands for 4 of them, an answer for 16; tokens and seconds are divided by the scale.
DEVICES, BATCH = 8, 16
SHAPE = EngineShape(0.012, 0.00048, 64)
RATE = 2500.0
STREAM: Any = {"pause": 16.76}
FULL: Any = {"fill": 5.98, "pause": 16.71}
"""Seconds of a publish of Qwen3-235B-A22B on 1,024 GPUs, by weights.staging (docs/weights.md)."""
WORKLOADS = ("sigma 0.9", "sigma 1.3", "slow tools", "half rejected")


def lengths(workload: str, scale: float) -> Lengths:
    """Return the distribution of episode lengths of a workload."""
    tools: Any = {"turns": 8.0, "tool_seconds": 10 / scale, "tool_sigma": 1.5, "tool_longest": 600 / scale}
    sigma = 1.3 if workload == "sigma 1.3" else 0.9
    more = tools if workload == "slow tools" else {}
    return Lengths(8000 / scale, sigma, round(27_000 / scale), 8, **more)


@dataclass(frozen=True)
class Mode:
    """A mode, which is one row of the table."""

    name: str
    max_staleness: int
    lead: int | None = None
    drain: bool = False
    colocated: bool = False
    parts: int = 1
    spread: bool = True
    in_play: int | None = 0
    fill: float = 0.0
    """Seconds in which the trainer fills buckets, before the engines pause."""
    pause: float = 3.0
    overlap: bool = False
    engines: int | None = None
    """Number of engines; None: that of the fastest split."""

    def setting(self, engines: int, scale: float) -> Setting:
        """Return the setting in which this many devices generate."""
        return Setting(
            DEVICES if self.colocated else engines,
            RATE * (DEVICES if self.colocated else DEVICES - engines),
            self.max_staleness,
            self.lead,
            train_fixed=(6.0 + self.fill) / scale,
            pause=(15.0 if self.colocated else self.pause) / scale,
            drain=self.drain,
            overlap=self.overlap,
            spread=self.spread,
            parts=self.parts,
            in_play=self.in_play,
            shape=SHAPE,
        )


LIMIT = 40 * 8  # episodes in play
MODES = [
    Mode("colocated", 0, colocated=True),
    Mode("lead 0", 0),
    Mode("bound 1", 1),
    Mode("bound 2", 2),
    Mode("bound 4", 4),
    Mode("bound 1, parts", 1, parts=8),  # trainer.batch_parts
    Mode("bound 2, parts", 2, parts=8),
    Mode("bound 4, parts", 4, parts=8),
    Mode("bound 8, parts", 8, parts=8),
    Mode("bound 4, lead 2", 4, lead=2),
    Mode("bound 8", 8),
    Mode("bound 8, lead 4", 8, lead=4),
    Mode("bound 4, drain", 4, drain=True),
    Mode("bound 4, together", 4, spread=False),  # the siblings of a group on one engine
    Mode("bound 8, together", 8, spread=False),
    Mode("bound 4, limited", 4, in_play=LIMIT),  # half of what admission allows: groups queue
    Mode("bound 8, auto", 8, in_play=None),  # rollout.max_running_groups
    Mode("bound 4, stream", 4, **STREAM),  # weights.staging
    Mode("bound 4, full", 4, **FULL),
    Mode("bound 4, overlap", 4, overlap=True, **FULL),  # weights.overlap
    Mode("bound 4, stream, 6+2", 4, engines=6, **STREAM),  # the trainer is the bottleneck
    Mode("bound 4, full, 6+2", 4, engines=6, **FULL),
    Mode("bound 4, overlap, 6+2", 4, engines=6, overlap=True, **FULL),
]
FEWER = ("bound 4", "bound 4, parts", "bound 8, parts")
"""Modes that run by default, besides the baseline."""


def dilated(name: str, modes: Sequence[Mode], steps: int, scale: float) -> dict[str, dict[str, float]]:
    """Measure every mode on one workload, compare it with the baseline, the law and the simulation, and print it."""
    rejected = 0.5 if name == "half rejected" else 0.0
    run = DilatedRun(lengths(name, scale), BATCH, rejected)
    try:
        workload = run.workload()
        tokens = [sum(one.tokens for one in workload.episodes(number)) for number in range(64 * BATCH)]
        accepted = replace(  # the engines generate the rejected groups, too
            SHAPE, per_token=SHAPE.per_token / (1 - rejected), per_request=SHAPE.per_request / (1 - rejected)
        )
        bound, _ = bottleneck_bound(DEVICES, accepted, RATE, 6.0 / scale, BATCH * sum(tokens) / len(tokens))
        found: dict[str, dict[str, float]] = {}
        print(f"\n{name}: no asynchronous run exceeds {bound:.0f} tokens/s\n{ROW.format(*COLUMNS)}", flush=True)
        rates: dict[str, tuple[Measured, SimulationResult]] = {}
        for mode in modes:
            # A synchronous step does not depend on those before, and takes several times as long. The others begin
            # with as many batches at once as the bound allows, which are generated faster than later ones can be:
            # the warm-up lasts until these are trained, and those that began beside them.
            synchronous = mode.max_staleness == 0
            warm = 1 if synchronous else max(6, 2 * (mode.max_staleness + 1))
            counted = math.ceil(steps / 2) if synchronous else steps
            setting, expected = best_split(mode, workload, counted, warm, scale)
            measured = run.run(setting, counted, warm, fill=mode.fill / scale)
            if measured.staleness_max > mode.max_staleness:
                sys.exit(f"{name}, {mode.name}: staleness {measured.staleness_max} exceeds the bound")
            rates[mode.name] = measured, expected
            base, simulated_base = rates["colocated"]
            ratio, predicted = (
                measured.tokens_per_s / base.tokens_per_s,
                expected.tokens_per_s / simulated_base.tokens_per_s,
            )
            found[mode.name] = {
                "tokens_per_s": measured.tokens_per_s,
                "async_over_colocated": ratio,
                "bound_fraction": measured.tokens_per_s / bound,
                "simulator_error": measured.tokens_per_s / expected.tokens_per_s - 1.0,
                "staleness_max": measured.staleness_max,
                "engines_still_s": measured.engines_still * scale,
                "trainer_still_s": measured.trainer_still * scale,
                "trainer_waits_s": measured.trainer_waits * scale,
                "in_flight": measured.in_flight,
                "crossing": measured.crossing,
                "repeated": measured.repeated,
            }
            if "lead 0" in rates:
                found[mode.name]["async_over_lead0"] = measured.tokens_per_s / rates["lead 0"][0].tokens_per_s
            row = ROW.format(
                mode.name,
                setting.engines,
                f"{measured.tokens_per_s:.0f}",
                f"{ratio:.2f}",
                f"{predicted:.2f} ({found[mode.name]['simulator_error']:+.0%})",
                f"{measured.tokens_per_s / bound:.0%}",
                f"{measured.staleness_mean:.1f}, {measured.staleness_max}",
            )
            print(row, flush=True)
        print(f"seconds of a step times {scale:g}, and as simulated\n{STILL_ROW.format(*STILL_COLUMNS)}")
        for mode in modes:
            if not mode.colocated and not mode.drain:
                print(still_row(mode, *rates[mode.name], scale), flush=True)
        return found
    finally:
        run.close()


def still_row(mode: Mode, measured: Measured, expected: SimulationResult, scale: float) -> str:
    """Return how long engines and trainer stand still for publishes, and what happens to the requests in flight."""
    waits = 0.0 if mode.overlap else mode.pause
    idle = max(0.0, (1 - expected.trainer_busy) * expected.step * scale - waits)
    return STILL_ROW.format(
        mode.name,
        f"{measured.engines_still * scale:.1f} ({mode.pause:.1f})",
        f"{measured.trainer_still * scale:.1f} ({mode.fill + waits:.1f})",
        f"{measured.trainer_waits * scale:.0f} ({idle:.0f})",
        f"{measured.in_flight:.0f}",
        f"{measured.crossing:.0%}",
        measured.repeated,
    )


def best_split(
    mode: Mode, workload: SimulatedWorkload, steps: int, warm: int, scale: float
) -> tuple[Setting, SimulationResult]:
    """Return the split of devices that is fastest in the simulation, and its result."""
    splits = [mode.engines] if mode.engines else range(1, 2 if mode.colocated else DEVICES)
    settings = [mode.setting(engines, scale) for engines in splits]
    outcomes = [simulate(workload, setting, steps, warm) for setting in settings]
    best = max(range(len(settings)), key=lambda i: outcomes[i].tokens_per_s)
    return settings[best], outcomes[best]


def real(options: argparse.Namespace, two_over_one: float, console: Console) -> dict[str, Any]:
    """Compare both modes on the real engine and trainer."""
    experiment, runs, steps = ("tiny", 1, 60) if options.quick else ("count_bits", options.runs, options.steps or 40)
    settings = [f"experiment={experiment}", f"run.max_steps={steps}", "eval.questions=0", *options.overrides]
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
    console.print(table)
    ratio = medians["async"]["samples_per_s"] / medians["lead 0"]["samples_per_s"]
    bound = machine_bound(medians["lead 0"], two_over_one)
    print(bound_line(ratio, bound, medians["lead 0"], two_over_one))
    return {
        "async_over_lead0": ratio,
        "machine_bound": bound,
        "of_machine_bound": ratio / bound if bound else None,
        **medians["async"],
        "lead0": medians["lead 0"],
    }


def machine_bound(synchronous: dict[str, float], two_over_one: float) -> float | None:
    """Return the largest ratio that the machine allows; None if overlap_bound does not apply."""
    if synchronous["processes"] != 2:
        return None
    return machine.overlap_bound(synchronous["generate_s"], synchronous["train_s"], two_over_one)


def bound_line(ratio: float, bound: float | None, synchronous: dict[str, float], two_over_one: float) -> str:
    """Return a readable line about the ratio and its bound."""
    if bound is None:
        return f"asynchronous over synchronous {ratio:.2f}; no bound: it is for one engine and one trainer on CPUs"
    return (
        f"asynchronous over synchronous {ratio:.2f}; this machine allows {bound:.2f} (generating "
        f"{synchronous['generate_s']:.2f} s, training and publishing {synchronous['train_s']:.2f} s, two processes do "
        f"{two_over_one:.2f} x what one does): {ratio / bound:.0%} of that"
    )


def measure(settings: list[str]) -> dict[str, float]:
    """Run a training and return its figures from metrics.jsonl.

    The first steps are excluded, because their batches were generated while the trainer started.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "asyncrl.launch.main",
            f"run.dir={run_dir}",
            "sinks.names=[]",
            *settings,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        processes = busy_processes(read(run_dir))
    steady = steps[len(steps) // 4 :]
    seconds = sum(step["time/step"] for step in steady)
    waiting = sum(step["time/wait_batch"] for step in steady)
    return {
        "samples_per_s": sum(step["samples/generated"] for step in steady) / seconds,
        "step_s": seconds / len(steady),
        "generate_s": waiting / len(steady),  # in a synchronous run, the trainer waits for the whole batch
        "train_s": (seconds - waiting) / len(steady),  # includes publishing, during which the engines pause
        "trainer_idle": waiting / seconds,
        "processes": float(processes),
        "engine_busy": sum(step["time/engine_busy"] for step in steady) / seconds,
        "publish_share": sum(step["time/publish"] for step in steady) / seconds,
        "pause_s": statistics.fmean(step["time/pause"] for step in steady),
    }


def busy_processes(config: Config) -> int:
    """Return the number of engine and trainer processes; 0 if not all of them run on this machine's CPU."""
    engine, trainer = config.engine, config.trainer
    if config.engine.urls or config.cluster.launcher != "local" or count_gpus(config.cluster.gpus):
        return 0
    return engine.started * engine.ranks + trainer.world_size


def rounded(value: Any) -> Any:
    """Return the value with all numbers rounded for display."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Measure, and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one mode and workload, or the tiny model")
    parser.add_argument("--full", action="store_true", help="more steps of all modes")
    parser.add_argument("--real", action="store_true", help="the real engine and trainer")
    parser.add_argument("--runs", type=int, default=3, help="--real: runs of each mode (default 3)")
    parser.add_argument("--steps", type=int, help="steps of each run (default 10, --full 24, --real 40)")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS)
    parser.add_argument("--modes", nargs="*", choices=[mode.name for mode in MODES], help="beside the baseline")
    parser.add_argument("--scale", type=float, default=80.0, help="of time; runs take as much longer when it is less")
    parser.add_argument("overrides", nargs="*", help="--real: further settings of asyncrl-train, for both modes")
    options = parser.parse_args()
    this = machine.report()
    if options.real:
        print(json.dumps({**rounded(real(options, this["two_over_one"], Console(width=110))), "machine": this}))
        return
    wanted = options.modes or (FEWER[:1] if options.quick else [mode.name for mode in MODES] if options.full else FEWER)
    modes = [mode for mode in MODES if mode.colocated or mode.name in wanted]
    workloads = options.workloads or (WORKLOADS[:1] if options.quick else WORKLOADS if options.full else WORKLOADS[:3])
    steps = options.steps or (24 if options.full else 10)
    found = {name: dilated(name, modes, steps, options.scale) for name in workloads}
    print(json.dumps({**rounded(found), "machine": this}))


if __name__ == "__main__":
    main()
