"""Everything that only GPUs can tell, in one command for a machine with one to eight of them.

    python scripts/bench_gpu.py [--quick] [--only PART ...] [--minutes N] [--after FILE] [--carried FOLDER]
    python scripts/bench_gpu.py --rehearse ...

It runs the tests marked gpu and multi_gpu, and measures a trainer's MFU, publishes over CUDA IPC and NCCL, pauses, runs
in turns and side by side, and runs end to end (scripts/gpu_parts.py). It checks engines of every setting
(scripts/gpu_engines.py). The parts come in the order of what they prove. Every part is a process of its own with a
deadline. A part that fails or takes too long is reported, the others follow, and the exit code is 1.
FOLDER (default: results/gpu) gets the output of every part, and DATE.json (DATE-2.json if that exists), which is
written anew after each part.

--quick takes fewer repetitions and smaller models. --minutes N ends after N minutes: a part begins only if the time
that it usually takes is left, and ends when no time is left. --after FILE leaves out what is ok in an earlier one.
--carried FOLDER first installs an offline bundle (asyncrl-install --bundle) into FOLDER/installed, where it also sees
the packages of this Python, and keeps compiled kernels in FOLDER/caches, which a later machine can be given too.
--rehearse runs the same parts on a CPU with tiny shapes, so that their code is executed where there is no GPU: its
numbers mean nothing, and the tests are only collected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.gpu_engines import SETTINGS  # noqa: E402  (what may be in a bundle is imported once that is installed)

GRACE = 30.0
"""Seconds for a part to end its own processes after its deadline, before all are killed."""
TAIL = 30
"""Lines of a failed part's output in the results."""
OK, SKIPPED, LEFT = "ok", "skipped", "left"
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "megatron-core", "transformers", "transformer-engine")
LENGTHS = ("--tokens", "4096", "16384", "65536")
"""An MFU says nothing without the length of its samples."""


@dataclass(frozen=True)
class Part:
    """One part: a command, how long it may take in seconds, how many GPUs it needs, and how long it usually takes on a
    Hopper GPU, by what was seen there (docs/gpu.md) or else by estimate."""

    name: str
    argv: list[str]
    deadline: float
    gpus: int = 1
    usual: float = 150.0


@dataclass
class Outcome:
    """What became of a part. `figures` is the last line of its output, if that is JSON."""

    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def parts(*, quick: bool, rehearse: bool) -> list[Part]:
    """Return all parts in their order: first what the most depends on."""
    flags = ["--quick"] * quick + ["--rehearse"] * rehearse
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    pytest += ["--collect-only"] if rehearse else []

    def measured(name: str, minutes: float, *arguments: str, gpus: int = 1, usual: float = 150.0) -> Part:
        argv = [sys.executable, str(ROOT / "scripts" / "gpu_parts.py"), *(arguments or (name,)), *flags]
        return Part(name, argv, minutes * 60, gpus, usual)

    def tests(name: str, path: str, workers: int = 1, usual: float = 150.0) -> Part:
        """Return the part of a file's tests, which run side by side: most of their time is one core's."""
        spread = ["-n", str(min(workers, os.cpu_count() or 1))] if workers > 1 and not rehearse else []
        return Part(name, [*pytest, *spread, "-m", "gpu and not multi_gpu", path], 3600, usual=usual)

    def engines(*names: str) -> list[Part]:
        made = {
            name: measured(f"engine-{name}", 15, "engine", name, gpus=SETTINGS[name].gpus, usual=120) for name in names
        }
        return [part for name, part in made.items() if not rehearse or SETTINGS[name].rehearsed]

    return [
        tests("tests-attention", "tests/trainer/test_gpu.py", 8, usual=60),
        tests("tests-trainer", "tests/integration/test_trainer_gpu.py", 14, usual=200),
        measured("mfu-0.6b", 20, "mfu", "0.6b", *LENGTHS, usual=120),
        measured("mfu-4b", 20, "mfu", "4b", *LENGTHS, usual=150),
        *engines("triton", "plain"),
        tests("tests-checksum", "tests/weights/test_checksum_answers.py", usual=30),
        tests("tests-weights", "tests/integration/test_weights_gpu.py"),
        measured("publish-ipc", 15, "publish", "ipc", usual=90),
        measured("pause", 20),
        measured("colocated", 30),
        measured("shared", 30),
        measured("accuracy", 30, usual=300),
        tests("tests-colocated", "tests/integration/test_colocated.py"),
        *engines("deepseek", "glm-flash", "fp8", "int8", "hicache"),
        measured("mfu-8b", 20, "mfu", "8b", *LENGTHS, usual=200),
        measured("mfu-moe", 20, "mfu", "moe", *LENGTHS, usual=200),
        Part("tests-multi-gpu", [*pytest, "-m", "multi_gpu", "tests"], 3600, gpus=2, usual=300),
        measured("publish-nccl", 15, "publish", "nccl", gpus=2),
        measured("run", 30, gpus=2),
        measured("run-overlap", 30, "run", "overlap", gpus=2),
        *engines("experts", "replicas", "stages", "all"),
    ]


def execute(part: Part, log: Path, left: float = float("inf")) -> Outcome:
    """Run a part to its end, to its deadline, or until `left` seconds have passed."""
    limit = min(part.deadline, left)
    environment = {**os.environ, "PYTHONPATH": _path(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("NCCL_CUMEM_ENABLE", "0")  # as in SGLang's processes: both ends of a group must agree
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            part.argv, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
            status = OK if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"failed: not done after {limit:.0f} s"
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


def execute_all(chosen: Sequence[Part], gpus: int, results: Results, ends: float = float("inf")) -> None:
    """Run the parts one after the other until the time `ends` of the monotonic clock. Each prints a line and is added
    to the results as it ends. Parts that need more GPUs are skipped, and those that need more time are left."""
    for part in chosen:
        left = ends - time.monotonic()
        if part.gpus > gpus:
            outcome = Outcome(part.name, SKIPPED, figures={"summary": f"needs {part.gpus} GPUs, here are {gpus}"})
        elif part.usual > left or left <= 0:
            outcome = Outcome(
                part.name, LEFT, figures={"summary": f"takes {part.usual:.0f} s, {max(left, 0):.0f} left"}
            )
        else:
            outcome = execute(part, results.folder / f"{part.name}.log", left)
        print(f"{part.name:16} {outcome.status:30} {outcome.seconds:7.1f} s  {_told(outcome.figures)}", flush=True)
        results.add(outcome)


class Results:
    """What is known so far: a file that is whole after every part, whatever becomes of the next one."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """Choose the first free name of today in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        today = time.strftime("%Y-%m-%d")
        names = (today if number == 1 else f"{today}-{number}" for number in count(1))
        self.folder = folder
        self.path = next(path for name in names if not (path := folder / f"{name}.json").exists())
        self.outcomes: list[Outcome] = []
        self._facts = facts

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a part, and write the file."""
        self.outcomes.append(outcome)
        written = {**self._facts, "parts": [asdict(one) for one in self.outcomes]}
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(written, indent=2) + "\n")
        beside.replace(self.path)

    @property
    def failed(self) -> bool:
        """Whether a part failed."""
        return any(outcome.status not in (OK, SKIPPED, LEFT) for outcome in self.outcomes)


def passed(path: Path) -> set[str]:
    """Return the names of the parts that are ok in the results of an earlier call. Raises SystemExit if the file is not
    one of this program's."""
    try:
        found = json.loads(path.read_text())["parts"]
        return {part["name"] for part in found if part["status"] == OK}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise SystemExit(f"bench_gpu: --after {path} is not a DATE.json of this program: {problem!r}") from problem


def carry(bundle: Path) -> tuple[Path, dict[str, str]]:
    """Install a bundle into a virtual environment that also sees the packages of this Python. Return its interpreter,
    and the environment that keeps compiled kernels beside it. What an earlier call installed stays."""
    home = bundle / "installed"
    python, whole = home / "bin" / "python", home / "whole"
    if not whole.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=False)  # pip is among those packages
        (site,) = home.glob("lib/python*/site-packages")
        outer = [path for path in sys.path if path.endswith("-packages")]  # each may have .pth files of its own
        (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
        command = [str(python), "-m", "asyncrl.extensions.install", "--from", str(bundle)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        whole.touch()
    compiled = {"SGLANG_JIT_CACHE_DIR": "jit", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    caches = {name: str(bundle / "caches" / folder) for name, folder in compiled.items()}
    return python, {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", **caches}


def _path(first: Path) -> str:
    """Return PYTHONPATH with a folder in front."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def _told(figures: dict[str, Any]) -> str:
    """Return figures on one line, with three digits."""
    values = {
        name: _told(value) if isinstance(value, dict) else f"{value:.3g}" if isinstance(value, float) else str(value)
        for name, value in figures.items()
        if value is not None
    }
    return "; ".join(f"{name} {value}" for name, value in values.items()).replace("|", "/")


def facts_of(gpus: int, *, rehearse: bool) -> dict[str, Any]:
    """Return what the machine is, and what runs on it."""
    import torch

    from scripts import machine

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "rehearsal": rehearse,
        "gpus": gpus if not rehearse else 0,
        "cards": cards,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "machine": machine.report(),
    }


def _said(*command: str) -> str | None:
    """Return the first line that a program prints, or None where it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(done.stdout.splitlines()), None) if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    """Run the parts, and write the results. Returns 1 if a part failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller models")
    parser.add_argument("--rehearse", action="store_true", help="execute the parts on a CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--minutes", type=float, help="end after so many minutes, installing included")
    parser.add_argument("--after", type=Path, metavar="FILE", help="leave out what is ok in an earlier DATE.json")
    parser.add_argument("--carried", type=Path, metavar="FOLDER", help="install this offline bundle first")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu")
    options = parser.parse_args()
    ends = began + 60 * options.minutes if options.minutes else float("inf")
    if options.carried and Path(sys.prefix) != (carried := options.carried.resolve()) / "installed":
        python, environment = carry(carried)
        # The same command with that Python, and with what installing has left of the time.
        left = [] if ends == float("inf") else ["--minutes", str((ends - time.monotonic()) / 60)]
        os.execve(python, [str(python), *sys.argv, *left], {**os.environ, **environment})

    from asyncrl.launch.machine import count_gpus

    gpus = count_gpus(None)
    if not gpus and not options.rehearse:
        print("bench_gpu: this machine has no visible GPU; --rehearse executes the parts on a CPU", file=sys.stderr)
        return 2
    if options.rehearse:
        gpus = 8  # no part is skipped
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan = parts(quick=options.quick, rehearse=options.rehearse)
    if unknown := set(options.only or ()) - {part.name for part in plan}:
        parser.error(f"--only {' '.join(sorted(unknown))}: the parts are {' '.join(part.name for part in plan)}")
    done = passed(options.after) if options.after else set()
    chosen = [part for part in plan if part.name not in done and part.name in (options.only or [part.name])]
    results = Results(options.out, facts_of(gpus, rehearse=options.rehearse))
    execute_all(chosen, gpus, results, ends)
    print(f"results in {results.path}")
    print(json.dumps({one.name: one.figures for one in results.outcomes}))
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
