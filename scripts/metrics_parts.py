"""What metrics cost a run, for scripts/bench_observe.py.

metrics_overhead            CPU seconds of all metrics code in a step, over those of all processes of the run
metrics_ms/episodes         CPU milliseconds in a step: of the metrics of episodes, in both forms (steps, Prometheus)
metrics_ms/status           of status.json, replaced once a second
metrics_ms/exposition       of /metrics, asked for every five seconds
metrics_ms/sinks            of TensorBoard with tables of episodes, in its thread
metrics_ms/engines          of the engines, for their counters: what one query took (docs/operations.md)

The first two are what a real run has measured itself; for the others its records pass through the same code again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import jsonl
from asyncrl.config import read
from asyncrl.extensions.counters.counters import SCRAPE_SECONDS
from asyncrl.extensions.observe.exposition import PrometheusMetrics
from asyncrl.extensions.sinks.sinks import Sinks
from asyncrl.extensions.timelines import files, reader
from asyncrl.extensions.timelines.files import EngineSpan, Started
from asyncrl.network.addresses import Addresses
from asyncrl.schema import Batch, Completion, Group, Trajectory, Turn, VersionSpan

SCRAPE_CPU = 0.008
"""CPU seconds of an engine for one query of its counters."""
ASKED_EVERY = 5.0


def measure(run: Path, spent: float) -> dict[str, float]:
    """Return the figures of a run that has ended, whose processes spent so many CPU seconds on each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wall = sum(row["time/step"] for row in rows) / len(rows)
    addresses = Addresses.read(run)
    exposed, status = PrometheusMetrics(run, addresses, "bench"), json.loads((run / "status.json").read_text())
    exposed.now = lambda: status
    for _, records in reader.read(run, files.ROLLOUT):
        for record in records:
            if not isinstance(record, Started | EngineSpan):
                exposed(record)
    milliseconds = {
        "episodes": 1e3 * sum(row["time/metrics"] for row in rows) / len(rows),
        "status": 1e3 * status["seconds"] / len(rows)
        + wall * _cpu(lambda: jsonl.replace(run / "copy.json", status), times=100),
        "exposition": wall / ASKED_EVERY * _cpu(exposed.render, times=100),
        "sinks": _cpu(lambda: _sinks(run, addresses, rows)) / len(rows),
        "engines": 1e3 * SCRAPE_CPU * wall / SCRAPE_SECONDS * len(addresses.engines),
    }
    found = {f"metrics_ms/{name}": value for name, value in milliseconds.items()}
    return {"metrics_overhead": sum(milliseconds.values()) / 1e3 / spent, **found}


def _sinks(run: Path, addresses: Addresses, rows: list[dict[str, Any]]) -> None:
    warned: list[str] = []
    config: Any = read(run)
    sinks = Sinks(config, config.sinks, run, addresses.model, lambda text, step: warned.append(text))
    for row in rows:
        answer = Completion([1] * 200, [-1.0] * 200, [VersionSpan(0, 0, 200)], "stop")
        group = Group("g", 0, [1] * 100, [Trajectory([Turn([], answer)], 1.0)] * 8, "task")
        sinks.write(row, Batch(int(row["step"]), [group] * 4, {}))
    if not sinks.close() or warned:
        raise RuntimeError(f"the sinks failed: {warned}")


def _cpu(work: Callable[[], object], times: int = 1) -> float:
    """Return the CPU milliseconds of this process, with all of its threads. Imports are not counted."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return 1e3 * (time.process_time() - began) / times
