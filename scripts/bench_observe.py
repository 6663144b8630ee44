"""Benchmark of observability: what it costs, and how much of a prompt's way its trace shows.

    python scripts/bench_observe.py [--quick] [--parts overhead,join] [SETTING=VALUE ...]

Each part runs a small experiment (`experiment=tiny`, whose steps are much shorter than those of a model that is worth
training, so that costs show). `--quick` shortens the runs. It prints a table and one line of JSON:

    span_overhead     CPU seconds of the code of timelines over the CPU seconds of all processes of the run, between its
                      first and its last step, with every group recorded
    interval_us       processor time of recording one interval of an episode, in microseconds
    timeline_bytes    bytes on disk for one episode
    trace_join_share  share of the prompts whose trace holds spans of rollout process, router and engine
    engine_spans      spans that engines and router sent for one prompt
    metrics_overhead  CPU seconds of all code of metrics over those of all processes, and its parts (metrics_parts.py)
    page_...          what the live page takes in a browser (page_parts.py)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.extensions.observe.otlp import ROUTER  # noqa: E402
from asyncrl.extensions.observe.spans import trace_id  # noqa: E402
from asyncrl.extensions.timelines import files  # noqa: E402
from asyncrl.extensions.timelines.files import EngineSpan, Started  # noqa: E402
from asyncrl.extensions.timelines.reader import TimelineReader  # noqa: E402
from asyncrl.observability.intervals import Activity, request  # noqa: E402
from asyncrl.observability.timeline import GroupTimeline, ProcessSpan  # noqa: E402
from scripts import machine, metrics_parts, page_parts  # noqa: E402

TINY = ["experiment=tiny", "metrics.console=false", "eval.questions=16"]
DEADLINE = 900.0
POLL_SECONDS = 0.05
Figures = dict[str, float]


def run(folder: Path, settings: list[str]) -> float:
    """Run an experiment in a folder. Return the CPU seconds of its processes between its first and last step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "asyncrl.launch.main", f"run.dir={folder}", *TINY, *settings]
    child = subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline, steps, seconds = time.monotonic() + DEADLINE, 0, list[float]()
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run in {folder} did not end within {DEADLINE:.0f} s")
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and (found := metrics.read_bytes().count(b"\n")) > steps:
                steps = found
                seconds.append(_cpu_seconds(child.pid))
            time.sleep(POLL_SECONDS)
    finally:
        child.terminate()
    if child.wait() or len(seconds) < 2:
        raise RuntimeError(f"the run ended with status {child.returncode} after {steps} steps: {argv}")
    return seconds[-1] - seconds[0]


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process and all that it started have taken so far."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def interval_seconds(count: int = 20_000) -> float:
    """Return the CPU seconds of recording one interval of a request."""
    activity = Activity()
    began = time.process_time()
    for _ in range(count):
        one = activity.begin("prefill")
        activity.heard(one)
        activity.close(one, request(one, one.first + 1, [(3, 5)]))
    return (time.process_time() - began) / len(activity.closed)


def phase_seconds(count: int = 20_000) -> float:
    """Return the CPU seconds of writing one span of a trainer, with those of the writer's thread."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-observe-") as folder:
        writer = files.TimelineWriter(Path(folder), "trainer 0", print)
        began = time.process_time()
        for number in range(count):
            writer.record(ProcessSpan("trainer 0", "forward", 1e9 + number, 1e9 + number + 0.5, number))
        writer.close()
        return (time.process_time() - began) / count


def overhead(folder: Path, *, quick: bool, settings: list[str]) -> Figures:
    """Measure the cost of timelines in a run with full recording."""
    steps = 10 if quick else 60
    cpu = run(folder, [f"run.max_steps={steps}", *settings])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = list(TimelineReader(folder).new())
    episodes = [one for record in records if isinstance(record, GroupTimeline) for one in record.episodes]
    share = (len(lines) - 1) / len(lines)  # of what is recorded between the first and the last step
    appended = share * interval_seconds() * sum(len(one.intervals) for one in episodes)
    phases = share * phase_seconds() * sum(isinstance(record, ProcessSpan) for record in records)
    spent = sum(line["time/timeline"] + line["timelines/time"] for line in lines[1:]) + appended + phases
    size = sum(file.stat().st_size for file in (folder / files.FOLDER / files.ROLLOUT).iterdir())
    return {
        "span_overhead": spent / cpu,
        "interval_us": interval_seconds() * 1e6,
        "timeline_bytes": size / len(episodes),
        "step_cpu_s": cpu / (len(lines) - 1),
    }


def join(folder: Path, *, quick: bool, settings: list[str]) -> Figures:
    """Measure how many prompts have a trace across all processes."""
    run(folder, [f"run.max_steps={4 if quick else 30}", "observe.engines=true", "engine.count=2", *settings])
    run_id, seen, count, prompts = "", defaultdict[str, set[str]](set), 0, set[str]()
    for record in TimelineReader(folder).new():
        if isinstance(record, Started):
            run_id = record.run_id
        elif isinstance(record, EngineSpan):
            seen[record.trace].add(record.service.split("-")[0])
            count += 1
        elif isinstance(record, GroupTimeline):
            prompts.add(record.uid)
    joined = sum({ROUTER, "engine"} <= seen[trace_id(run_id, uid)] for uid in prompts)
    return {"trace_join_share": joined / len(prompts), "engine_spans": count / len(prompts)}


def metrics(folder: Path, *, quick: bool, settings: list[str]) -> Figures:
    """Measure what the metrics of a run cost."""
    steps = 8 if quick else 40
    spent = run(folder, [f"run.max_steps={steps}", *settings])
    return metrics_parts.measure(folder, spent / (steps - 1))


PARTS: dict[str, Callable[..., Figures]] = {
    "overhead": overhead,
    "join": join,
    "metrics": metrics,
    "page": page_parts.page,
}
"""Parts by name. Each gets an empty folder, `quick`, and further settings of asyncrl-train."""


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--parts", default=",".join(PARTS), help="names of the parts, separated by commas")
    parser.add_argument("settings", nargs="*", help="further settings of asyncrl-train")
    options = parser.parse_args()
    this = machine.report()
    figures: Figures = {}
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="asyncrl-observe-") as folder:
            figures |= PARTS[name](Path(folder) / "run", quick=options.quick, settings=options.settings)
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    Console(width=120).print(table)
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(json.dumps({**rounded, "quick": options.quick, "machine": this}))


if __name__ == "__main__":
    main()
