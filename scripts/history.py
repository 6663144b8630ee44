"""Run the tiny and the default experiment, and compare their curves with the bands in results/history.json.

    python scripts/history.py                       every run of the file: about eight minutes on two cores
    python scripts/history.py tiny                  this one only
    python scripts/history.py tiny --runs A B       compare runs that were made already
    python scripts/history.py tiny --record A B     set the bands from runs made already

A test says that something works; this says that it has not slowly become worse, or better for no reason. A figure that
leaves its band on either side is an error. A change that moves a band on purpose records it and says so in its commit.

Each curve has a point for each fifth of the run: the mean of reward, gap, staleness; and the median time of a step, as
the billions of multiplications and additions that one process of this machine could do meanwhile (scripts/machine.py),
so that a slow machine is not taken for a slow program. The default runs in float32, since the gap depends on the
number format, which `auto` chooses by the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts import machine

FILE = Path(__file__).resolve().parent.parent / "results" / "history.json"
PARTS = 5
MARGINS = {
    "reward/mean": (0.1, 1.5),
    "logprob_gap/mean": (0.002, 3.0),
    "staleness/mean": (0.6, 1.25),
    "step/work": (0.0, 2.5),
    "accuracy/before": (0.05, 1.0),
    "accuracy/after": (0.1, 1.5),
}
"""How far a band reaches beyond the recorded runs on both sides: by so much, or by this factor if that is further. A
few runs of one machine do not show the whole spread."""

Curve = dict[str, list[float]]
Bands = Mapping[str, Sequence[Sequence[float]]]


def curve(run: Path) -> Curve:
    """Return the points of a run. It must have ended, and hold the machine's rate in GFLOP/s in rate.json."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary, rate = json.loads((run / "summary.json").read_text()), json.loads((run / "rate.json").read_text())
    cuts = [len(steps) * part // PARTS for part in range(PARTS + 1)]
    parts = [steps[start:end] for start, end in itertools.pairwise(cuts)]
    points: Curve = {}
    for name in ("reward/mean", "logprob_gap/mean", "staleness/mean"):
        points[name] = [round(statistics.fmean(step[name] for step in part), 4) for part in parts]
    points["step/work"] = [round(statistics.median(step["time/step"] for step in part) * rate, 1) for part in parts]
    for name in ("accuracy/before", "accuracy/after"):
        points[name] = [summary[name]]
    return points


def bands(curves: Sequence[Curve]) -> dict[str, list[list[float]]]:
    """Return the band of every point: what the curves reach, and the margin on both sides."""
    found = {}
    for name, (least, factor) in MARGINS.items():
        points = zip(*(one[name] for one in curves), strict=True)
        found[name] = [_band(values, least, factor) for values in points]
    return found


def _band(values: Sequence[float], least: float, factor: float) -> list[float]:
    low, high = min(values), max(values)
    return [round(max(0.0, min(low - least, low / factor)), 4), round(max(high + least, high * factor), 4)]


def outside(points: Curve, allowed: Bands) -> list[str]:
    """Return a line for each figure that left its band, or that one side does not have."""
    lines = [f"{name}: in the run or in the bands only" for name in sorted(points.keys() ^ allowed.keys())]
    for name in sorted(points.keys() & allowed.keys()):
        if len(points[name]) != len(allowed[name]):
            lines.append(f"{name}: {len(points[name])} points, {len(allowed[name])} bands")
            continue
        for number, (value, (low, high)) in enumerate(zip(points[name], allowed[name], strict=True), 1):
            if not low <= value <= high:  # also NaN
                side = "above" if value > high else "below"
                lines.append(f"{name}, part {number} of {len(points[name])}: {value:g} is {side} {low:g} to {high:g}")
    return lines


def made(arguments: Sequence[str], folder: Path) -> Path:
    """Train in `folder`, with the machine's rate from before and after the run, and return it."""
    before = machine.measured().gflops_one
    subprocess.run([sys.executable, "-m", "asyncrl.launch.main", *arguments, f"run.dir={folder}"], check=True)
    rates = [before, machine.measured().gflops_one]
    (folder / "rate.json").write_text(json.dumps(statistics.fmean(rates)))
    return folder


def main() -> int:
    """Return 1 if a curve left its bands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    history: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    parser.add_argument("names", nargs="*", help=f"of {', '.join(history)}; all by default")
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of runs to compare instead of making one")
    parser.add_argument("--record", nargs="+", type=Path, help="folders of runs from which to set the bands")
    options = parser.parse_args()
    if unknown := set(options.names) - history.keys():
        parser.error(f"{FILE.name} has {', '.join(history)}, and not {', '.join(sorted(unknown))}")
    if (options.runs or options.record) and len(options.names) != 1:
        parser.error("--runs and --record need the name of one experiment")
    if options.record:
        history[options.names[0]]["bands"] = bands([curve(run) for run in options.record])
        rows = ",\n".join(f"{json.dumps(name)}: {_rows(entry)}" for name, entry in history.items())
        FILE.write_text(f"{{\n{rows}\n}}\n")
        return 0
    wrong = 0
    for name in options.names or history:
        with tempfile.TemporaryDirectory(prefix="asyncrl-history-") as folder:
            for run in options.runs or [made(history[name]["arguments"], Path(folder) / name)]:
                points = curve(run)
                lines = outside(points, history[name]["bands"])
                print(json.dumps({"name": name, "curve": points, "outside": lines}), flush=True)
                wrong += len(lines)
    return 1 if wrong else 0


def _rows(entry: dict[str, Any]) -> str:
    """Return an entry of the file with a line for each band."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(band)}" for name, band in entry["bands"].items())
    return f'{{\n  "arguments": {json.dumps(entry["arguments"])},\n  "bands": {{\n{lines}\n  }}\n}}'


if __name__ == "__main__":
    sys.exit(main())
