"""Everything that only GPUs can tell, in one command for a machine with one to eight of them.

    python scripts/bench_gpu.py [--quick] [--only PART ...] [--out FOLDER]
    python scripts/bench_gpu.py --rehearse [--only PART ...] [--out FOLDER]

It runs the tests marked gpu and multi_gpu, and measures a trainer's MFU, publishes over CUDA IPC and NCCL, pauses, runs
in turns, and runs end to end (scripts/gpu_parts.py). It checks engines of every setting (scripts/gpu_engines.py). Every
part is a process of its own with a deadline. A part that fails or takes too long is reported, the others follow, and
the exit code is 1. FOLDER (default: results/gpu) gets bench_gpu.json, the page bench_gpu.md, and the output of every
part.

--quick takes fewer repetitions and smaller models. --rehearse runs the same parts on a CPU with tiny shapes, so that
their code is executed where there is no GPU: its numbers mean nothing, and the tests are only collected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.launch.machine import count_gpus  # noqa: E402
from scripts import machine  # noqa: E402
from scripts.gpu_engines import SETTINGS  # noqa: E402

GRACE = 30.0
"""Seconds for a part to end its own processes after its deadline, before all are killed."""
TAIL = 30
"""Lines of a failed part's output on the page."""
OK, SKIPPED = "ok", "skipped"


@dataclass(frozen=True)
class Part:
    """One part: a command, how long it may take in seconds, and how many GPUs it needs."""

    name: str
    argv: list[str]
    deadline: float
    gpus: int = 1


@dataclass
class Outcome:
    """What became of a part. `figures` is the last line of its output, if that is JSON."""

    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def parts(*, quick: bool, rehearse: bool) -> list[Part]:
    """Return all parts in their order."""
    flags = ["--quick"] * quick + ["--rehearse"] * rehearse
    pytest = [sys.executable, "-m", "pytest", "-q", *(["--collect-only"] if rehearse else [])]

    def measured(name: str, minutes: float, *arguments: str, gpus: int = 1) -> Part:
        argv = [sys.executable, str(ROOT / "scripts" / "gpu_parts.py"), *(arguments or (name,)), *flags]
        return Part(name, argv, minutes * 60, gpus)

    return [
        Part("tests-gpu", [*pytest, "-m", "gpu", "tests"], 3600),
        Part("tests-multi-gpu", [*pytest, "-m", "multi_gpu", "tests"], 3600, gpus=2),
        *(measured(f"mfu-{shape}", 20, "mfu", shape) for shape in ("0.6b", "4b", "8b", "moe")),
        measured("publish-ipc", 15, "publish", "ipc"),
        measured("publish-nccl", 15, "publish", "nccl", gpus=2),
        measured("pause", 20),
        *(measured(f"engine-{name}", 15, "engine", name, gpus=one.gpus) for name, one in SETTINGS.items()),
        measured("shared", 30),
        measured("colocated", 30),
        measured("run", 30, gpus=2),
        measured("run-overlap", 30, "run", "overlap", gpus=2),
    ]


def execute(part: Part, log: Path) -> Outcome:
    """Run a part to its end, or to its deadline."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("NCCL_CUMEM_ENABLE", "0")  # as in SGLang's processes: both ends of a group must agree
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            part.argv, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(part.deadline)
            status = OK if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"failed: not done after {part.deadline:.0f} s"
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    tail = [] if status == OK else lines[-TAIL:]
    return Outcome(part.name, status, time.monotonic() - began, _figures(lines), tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part's process group: first by SIGTERM, on which runs and engines end what they have started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    """Return the last line of a part's output as JSON, or as a summary if it is another one (pytest's)."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(last)
        if isinstance(found, dict):
            return found
    return {"summary": last.strip("= ")}


def execute_all(chosen: Sequence[Part], gpus: int, folder: Path) -> list[Outcome]:
    """Run the parts one after the other, and print a line for each. Parts that need more GPUs are skipped."""
    outcomes = []
    for part in chosen:
        if part.gpus > gpus:
            outcome = Outcome(part.name, SKIPPED, figures={"summary": f"needs {part.gpus} GPUs, here are {gpus}"})
        else:
            outcome = execute(part, folder / f"{part.name}.log")
        print(f"{part.name:16} {outcome.status:30} {outcome.seconds:7.1f} s  {_told(outcome.figures)}", flush=True)
        outcomes.append(outcome)
    return outcomes


def failed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a part failed."""
    return any(outcome.status not in (OK, SKIPPED) for outcome in outcomes)


def page(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    heading = "# Rehearsal on a CPU: the numbers mean nothing\n" if facts["rehearsal"] else "# GPU benchmark\n"
    lines = [heading, *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| part | status | seconds | figures |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.status} | {one.seconds:.0f} | {_told(one.figures)} |" for one in outcomes]
    for one in outcomes:
        if one.tail:
            lines += ["", f"## {one.name}: {one.status}", "", "```", *one.tail, "```"]
    return "\n".join(lines) + "\n"


def _told(figures: dict[str, Any]) -> str:
    """Return figures on one line, with three digits."""
    values = {
        name: _told(value) if isinstance(value, dict) else f"{value:.3g}" if isinstance(value, float) else str(value)
        for name, value in figures.items()
        if value is not None
    }
    return "; ".join(f"{name} {value}" for name, value in values.items()).replace("|", "/")


def facts_of(gpus: int, *, rehearse: bool) -> dict[str, Any]:
    """Return what the machine is."""
    import torch

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "rehearsal": rehearse,
        "gpus": gpus if not rehearse else 0,
        "cards": cards,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "machine": machine.report(),
    }


def main() -> int:
    """Run the parts, and write results and page. Returns 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [part.name for part in parts(quick=False, rehearse=False)]
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller models")
    parser.add_argument("--rehearse", action="store_true", help="execute the parts on a CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, metavar="PART")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu")
    options = parser.parse_args()
    gpus = count_gpus(None)
    if not gpus and not options.rehearse:
        print("bench_gpu: this machine has no visible GPU; --rehearse executes the parts on a CPU", file=sys.stderr)
        return 2
    if options.rehearse:
        gpus = 8  # no part is skipped
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(quick=options.quick, rehearse=options.rehearse) if part.name in options.only]
    facts = facts_of(gpus, rehearse=options.rehearse)
    outcomes = execute_all(chosen, gpus, options.out)
    results = {**facts, "parts": [asdict(outcome) for outcome in outcomes]}
    (options.out / "bench_gpu.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "bench_gpu.md").write_text(page(outcomes, facts))
    print(f"results in {options.out}")
    print(json.dumps({**{one.name: one.figures for one in outcomes}, "machine": facts["machine"]}))
    return int(failed(outcomes))


if __name__ == "__main__":
    sys.exit(main())
