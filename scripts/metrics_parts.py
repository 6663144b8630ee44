"""What metrics cost a run, for scripts/bench_observe.py.

metrics_overhead            CPU seconds of all metrics code in a step, over those of all processes of the run
metrics_ms/episodes         CPU milliseconds in a step: of the metrics of episodes, in both forms (steps, Prometheus)
metrics_ms/status           of status.json, replaced once a second
metrics_ms/exposition       of /metrics, asked for every five seconds
metrics_ms/sinks            of TensorBoard with tables of episodes, in its thread
metrics_ms/engines          of the engines, for their counters: what one query took (docs/observability.md)

A real run is started and its CPU seconds are counted; then its own records pass through the same code again, alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from asyncrl import jsonl
from asyncrl.config import read
from asyncrl.engine.loads import SCRAPE_SECONDS
from asyncrl.metrics.sinks import Sinks
from asyncrl.network.addresses import Addresses
from asyncrl.observability import timeline
from asyncrl.observability.episodes import EpisodeFigures
from asyncrl.rollout.exposition import PrometheusMetrics
from asyncrl.schema import Batch, Completion, Group, Trajectory, Turn, VersionSpan

SCRAPE_CPU = 0.008
"""CPU seconds of an engine for one query of its counters."""
ASKED_EVERY = 5.0
FIRST, LAST = 3, 9
"""Steps between which the run's CPU seconds are counted."""


def measure(folder: Path, quick: bool, *overrides: str) -> dict[str, float]:
    """Run an experiment in `folder` and return the figures."""
    run = folder / "run"
    spent = _run(run, "experiment=tiny" if quick else "experiment=default", *overrides)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wall = sum(row["time/step"] for row in rows) / len(rows)
    records = [record for _, found in timeline.read(run, timeline.ROLLOUT) for record in found]
    addresses = Addresses.read(run)
    exposed, status = PrometheusMetrics(run, addresses, "bench"), json.loads((run / "status.json").read_text())
    exposed.now = lambda: status
    figures = EpisodeFigures({row: lambda reward: reward > 0.5 for row in read(run).mixture})

    def episodes() -> None:
        for record in records:
            figures(record)
            exposed(record)
            if isinstance(record, timeline.BatchTimeline):
                figures.take_figures()

    milliseconds = {
        "episodes": _cpu(episodes) / len(rows),
        "status": 1e3 * status["seconds"] / len(rows)
        + wall * _cpu(lambda: [jsonl.replace(run / "copy.json", status) for _ in range(100)]) / 100,
        "exposition": wall / ASKED_EVERY * _cpu(lambda: [exposed.render() for _ in range(100)]) / 100,
        "sinks": _cpu(lambda: _sinks(run, addresses, rows)) / len(rows),
        "engines": 1e3 * SCRAPE_CPU * wall / SCRAPE_SECONDS * len(addresses.engines),
    }
    found = {f"metrics_ms/{name}": value for name, value in milliseconds.items()}
    return {"metrics_overhead": sum(milliseconds.values()) / 1e3 / (spent / (LAST - FIRST)), **found}


def _run(run: Path, *overrides: str) -> float:
    """Run to the end, and return the CPU seconds of all of its processes between two steps."""
    settings = [*overrides, f"run.dir={run}", f"run.max_steps={LAST + 1}", "eval.questions=0"]
    command = [sys.executable, "-m", "asyncrl.launch.main", *settings]
    before = after = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not after:
            file = run / "metrics.jsonl"
            step = len(file.read_text().splitlines()) if file.exists() else 0
            before = before or (_of_tree(process.pid) if step >= FIRST else 0.0)
            after = _of_tree(process.pid) if step >= LAST else 0.0
            time.sleep(0.02)
    if process.returncode or not after:
        raise RuntimeError(f"the run in {run} ended with {process.returncode}")
    return after - before


def _of_tree(pid: int) -> float:
    found = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (found, *found.children(recursive=True)))


def _sinks(run: Path, addresses: Addresses, rows: list[dict[str, Any]]) -> None:
    warned: list[str] = []
    sinks = Sinks(read(run), run, addresses.model, lambda text, step: warned.append(text))
    for row in rows:
        answer = Completion([1] * 200, [-1.0] * 200, [VersionSpan(0, 0, 200)], "stop")
        group = Group("g", 0, [1] * 100, [Trajectory([Turn([], answer)], 1.0)] * 8, "task")
        sinks.write(row, Batch(int(row["step"]), [group] * 4, {}))
    if not sinks.close() or warned:
        raise RuntimeError(f"the sinks failed: {warned}")


def _cpu(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of this process, with all of its threads. Imports are not counted."""
    work()
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measure(Path(place), "--quick" in sys.argv)))
