"""Benchmark of a trainer's death: seconds until the next trained step, against a restart of the whole run.

    python scripts/bench_recovery.py [--quick] [--stubs] [SETTING=VALUE ...]

The last rank, by default of two, is killed at the same step of two runs of the tiny experiment with real engines. Other
layouts: trainer.data_parallel=1 trainer.tensor_parallel=2 trainer.pipeline_parallel=2. In one of them the
trainers start again (cluster.on_death=recover), the other ends and is resumed by the same command. It prints
one line of JSON:

    recover_s               from the kill to the next new line of metrics.jsonl
    restart_s               the same, from the end of the whole run and a resume to its first new step
    recover_over_restart    the first over the second
    told_s                  what the trainers say: from the launcher's notice of the death to the first publish
    replay_over_step        seconds of a step that is trained again, over those of one before the kill, which waits for
                            the engines
    tokens_meanwhile_share  tokens generated between the kill and the next step, over those of as many seconds before it
    bits_equal              whether the trainers held the weights that were served, after they had caught up

`--quick` uses a shorter run. `--stubs` has stub engines, which hold no weights that could be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.extensions.timelines.reader import TimelineReader  # noqa: E402
from asyncrl.jsonl import Tail  # noqa: E402
from asyncrl.observability.timeline import ProcessSpan  # noqa: E402
from scripts import machine  # noqa: E402
from tests.integration.workload import Workload  # noqa: E402

EVERY, KILLED_AT, STEPS = 10, 26, 40
QUICK = (4, 6, 10)
"""The same in a shorter run."""
STUBBED = ["weights.transport=disk", "weights.verify=false", "cluster.tls=false"]
LENGTHS = {"mean": 16.0, "sigma": 0.9, "longest": 40, "group_size": 8, "seed": 0}
"""Settings of a run with stub engines, and the lengths of their answers."""
DEADLINE = 900.0
TOLD = re.compile(r"the trainers go on after ([\d.]+) s")


def stubbed(settings: list[str]) -> bool:
    """Return whether the engines are stubs."""
    return {*STUBBED} <= {*settings}


def start(run_dir: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    """Start a run with two trainer ranks."""
    words = ["experiment=tiny", "eval.questions=0", "trainer.data_parallel=2", f"run.dir={run_dir}", *settings]
    module = "tests.integration.stub_run" if stubbed(settings) else "asyncrl.launch.main"
    return subprocess.Popen([sys.executable, "-m", module, *words], stdout=subprocess.DEVNULL)


def steps(run_dir: Path) -> int:
    """Return the newest step."""
    return max((line["version"] for line in Tail(run_dir / "metrics.jsonl")()), default=0)


def tokens(run_dir: Path) -> int:
    """Return the tokens that the engines have generated, as the rollout process reports every second."""
    status = json.loads((run_dir / "status.json").read_text())
    return int(status["ledger"]["tokens"]["generated"])


def wait_for_step(run_dir: Path, step: int) -> float:
    """Wait for a step, and return the time."""
    deadline = time.monotonic() + DEADLINE
    while steps(run_dir) < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"no step {step} within {DEADLINE:.0f} s: see {run_dir}/logs")
        time.sleep(0.02)
    return time.monotonic()


def replayed(run_dir: Path) -> float | None:
    """Return the mean seconds of a step that was trained again, over those of a step before; None if fewer than two
    were."""
    spans = [one for one in TimelineReader(run_dir).new() if isinstance(one, ProcessSpan) and one.name == "train"]
    began: dict[int, list[float]] = {}
    for span in sorted(spans, key=lambda one: one.start):
        if span.process.startswith("trainer 0"):
            began.setdefault(span.step, []).append(span.start)
    again = [starts[-1] for _, starts in sorted(began.items()) if len(starts) > 1]
    before = [starts[0] for _, starts in sorted(began.items()) if starts[0] < again[0]] if again else []
    if len(again) < 2 or len(before) < 2:
        return None
    per_step = [(times[-1] - times[0]) / (len(times) - 1) for times in (again, before)]
    return round(per_step[0] / per_step[1], 3)


def kill(run: subprocess.Popen[bytes]) -> None:
    """Kill the last rank."""
    trainers = [child for child in psutil.Process(run.pid).children() if "asyncrl.trainer" in child.cmdline()]
    os.kill(max(trainers, key=lambda child: int(child.environ()["RANK"])).pid, signal.SIGKILL)


def measure(folder: Path, every: int, killed_at: int, last: int, settings: list[str]) -> dict[str, Any]:
    """Measure both kinds of death."""
    common = [f"run.max_steps={last}", f"checkpoint.every={every}", "resume=auto", *settings]
    recovers, ends = folder / "recovers", folder / "ends"
    run = start(recovers, [*common, "cluster.on_death=recover"])
    began = wait_for_step(recovers, killed_at - 3)
    before = tokens(recovers)
    killed = wait_for_step(recovers, killed_at)
    rate = (tokens(recovers) - before) / (killed - began)
    at, generated = steps(recovers), tokens(recovers)
    kill(run)
    recover = wait_for_step(recovers, at + 1) - killed
    meanwhile = tokens(recovers) - generated
    if run.wait(DEADLINE):
        raise SystemExit(f"the run whose trainers start again has failed: see {recovers}/logs")
    told = " ".join(line["warning"] for line in Tail(recovers / "warnings.jsonl")())

    words = [*common, "cluster.on_death=end"]
    run = start(ends, words)
    killed = wait_for_step(ends, killed_at)
    at = steps(ends)
    kill(run)
    run.wait(DEADLINE)
    run = start(ends, words)
    while steps(ends) >= at:  # until the steps since the checkpoint are rolled back
        time.sleep(0.02)
    restart = wait_for_step(ends, at + 1) - killed
    run.wait(DEADLINE)
    return {
        "recover_s": round(recover, 2),
        "restart_s": round(restart, 2),
        "recover_over_restart": round(recover / restart, 3),
        "told_s": float(found[1]) if (found := TOLD.search(told)) else None,
        "replay_over_step": replayed(recovers),
        "tokens_meanwhile_share": round(meanwhile / (rate * recover), 3),
        "bits_equal": None if stubbed(settings) else "the weights are the same" in told,
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    parser.add_argument("--stubs", action="store_true", help="stub engines")
    parser.add_argument("settings", nargs="*", help="further settings of asyncrl-train")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    this = machine.report()
    every, killed_at, last = QUICK if options.quick else (EVERY, KILLED_AT, STEPS)
    with tempfile.TemporaryDirectory(prefix="asyncrl-recovery-") as folder:
        settings = options.settings
        if options.stubs:
            loaded = str(Path(folder) / "loaded.jsonl")
            stubs = Workload(lengths=LENGTHS, per_token=0.005, start_after=[0.0], train_seconds=0.0, loaded=loaded)
            os.environ |= stubs.environment()
            settings = [*STUBBED, "rollout.max_new_tokens=40", *settings]
        found = measure(Path(folder), every, killed_at, last, settings)
    print(json.dumps({**found, "quick": options.quick, "stubs": options.stubs, "machine": this}))


if __name__ == "__main__":
    main()
