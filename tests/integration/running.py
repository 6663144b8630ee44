"""Helpers that run the command like a user, and read the files that it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.jsonl import Tail
from asyncrl.metrics.fields import unknown

STEPS, BOUND, BATCH, GROUP = 14, 3, 4, 8
RUN = [
    f"run.max_steps={STEPS}",
    "eval.questions=8",
    f"rollout.batch_groups={BATCH}",
    f"rollout.group_size={GROUP}",
    f"rollout.max_staleness={BOUND}",
    "rollout.lead=2",
    "record=true",
    "resume=auto",
    "checkpoint.every=2",
    "cluster.on_death=end",
]
DETERMINISTIC = ["deterministic=true", "rollout.max_staleness=0", "rollout.lead=null"]
TIMEOUT = 600.0
"""Time limit of a run in seconds: many times its duration, so that tests do not fail on a busy machine."""


@contextmanager
def start(
    run_dir: Path, *overrides: str, module: str = "asyncrl.launch.main", experiment: str = "tiny"
) -> Iterator[subprocess.Popen[str]]:
    """Run asyncrl-train with an experiment and these overrides, and its output in run_dir.out.

    It is ended when the context is left.
    """
    command = [sys.executable, "-m", module, f"experiment={experiment}", f"run.dir={run_dir}", *overrides]
    with run_dir.with_suffix(".out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def finish(process: subprocess.Popen[str], run_dir: Path, timeout: float = TIMEOUT) -> tuple[int, str]:
    """Return exit code and output."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run did not end within {timeout} s:\n{output(run_dir)[-3000:]}") from None
    return code, output(run_dir)


def output(run_dir: Path) -> str:
    """Return what the command printed so far."""
    return run_dir.with_suffix(".out").read_text()


def run(run_dir: Path, *overrides: str, timeout: float = TIMEOUT, experiment: str = "tiny") -> list[dict[str, Any]]:
    """Run a training that must succeed, and return its step records."""
    with start(run_dir, *overrides, experiment=experiment) as process:
        code, text = finish(process, run_dir, timeout)
    assert code == 0, text
    steps = lines(run_dir / "metrics.jsonl")
    assert unknown({name for step in steps for name in step}) == []
    return steps


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file that may still be written; none if it does not exist."""
    return Tail(path)()


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout: float = TIMEOUT) -> None:
    """Wait until the run has trained `step` batches."""
    deadline = time.monotonic() + timeout
    while len(lines(run_dir / "metrics.jsonl")) < step:
        assert process.poll() is None, f"the run ended before step {step}:\n{evidence(run_dir)}"
        assert time.monotonic() < deadline, f"no step {step} within {timeout} s:\n{evidence(run_dir)}"
        time.sleep(0.1)


def evidence(run_dir: Path, number: int = 30) -> str:
    """Return the last lines of what the command printed and of every log of the run, for a test that failed."""
    files = [run_dir.with_suffix(".out"), *sorted((run_dir / "logs").glob("*.log"))]
    last = {file.name: file.read_text().splitlines()[-number:] for file in files if file.exists()}
    return "\n".join("\n".join([f"--- {name}", *ends]) for name, ends in last.items())


def processes_of(launcher: subprocess.Popen[str], run_dir: Path) -> dict[str, int]:
    """Return the pids of the launcher's living children by name, which follows from the log that each writes."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        with suppress(OSError):  # it died meanwhile
            log = Path(os.readlink(f"/proc/{child.pid}/fd/1"))
            if log.parent == run_dir / "logs":
                found[log.stem] = child.pid
    return found


def wait_for_process(launcher: subprocess.Popen[str], run_dir: Path, name: str, timeout: float = TIMEOUT) -> int:
    """Wait until the launcher has started a process, and return its pid. By then, a resumed run has removed the lines
    of the steps that it repeats."""
    deadline = time.monotonic() + timeout
    while name not in processes_of(launcher, run_dir):
        assert launcher.poll() is None, f"the run ended before it started {name}:\n{evidence(run_dir)}"
        assert time.monotonic() < deadline, f"no {name} within {timeout} s:\n{evidence(run_dir)}"
        time.sleep(0.1)
    return processes_of(launcher, run_dir)[name]


def descendants(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return every process of a run, whatever its name or session."""
    return psutil.Process(launcher.pid).children(recursive=True)


def pids_carrying(run_id: str) -> list[int]:
    """Return the pids of a run's living processes, whatever their parents."""
    mark = f"ASYNCRL_RUN_ID={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def nothing_is_left(run_dir: Path, processes: list[psutil.Process] | None = None) -> None:
    """Check that none of these processes is alive, nor any that carries the run's id (SGLang's overwrite theirs with
    their names)."""
    run_id = json.loads((run_dir / "addresses.json").read_text())["run_id"]
    deadline = time.monotonic() + 60
    while (left := [*pids_carrying(run_id), *alive(processes or [])]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind: {left}"


def alive(processes: list[psutil.Process]) -> list[int]:
    """Return the pids of the processes that are alive; zombies are not."""
    alive = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
    return alive


def wait_until(met: Callable[[], bool], process: Any, run_dir: Path, what: str) -> None:
    """Wait until this is so, while the run goes on."""
    deadline = time.monotonic() + TIMEOUT
    while not met():
        assert process.poll() is None, f"the run ended before {what}:\n{evidence(run_dir)}"
        assert time.monotonic() < deadline, f"not within {TIMEOUT} s: {what}\n{evidence(run_dir)}"
        time.sleep(0.1)


def serving(run_dir: Path) -> float:
    """Return how many engines served in the last step."""
    return float(lines(run_dir / "metrics.jsonl")[-1]["engines/serving"])


@dataclass(frozen=True)
class Blow:
    """Kill of one process at a given moment."""

    victim: str
    step: int  # behind which it comes
    delay: float  # seconds later

    def strike(self, run_dir: Path, *settings: str) -> str:
        """Start the run and inject the kill. Return what it printed."""
        with start(run_dir, *RUN, *settings) as launcher:
            wait_for_step(launcher, run_dir, self.step)
            time.sleep(self.delay)
            started, named = descendants(launcher), processes_of(launcher, run_dir)
            victims = sorted(name for name in named if name.startswith(self.victim))
            if self.victim == "everything":
                launcher.kill()  # its children die with it
            elif victims:
                os.kill(named[victims[-1]], signal.SIGKILL)
            code, text = finish(launcher, run_dir)
        assert code in (0, 1, -signal.SIGKILL), text  # it may have ended before
        if code == 1:
            assert f"{victims[-1]} died: killed by SIGKILL" in text, text
        nothing_is_left(run_dir, started)
        return text


def go_on_to_the_end(run_dir: Path, *settings: str, victim: str = "", step: int = 0) -> str:
    """Run the same command again. A process that is restarted may be killed behind a step."""
    with start(run_dir, *RUN, *settings) as launcher:
        if victim:
            pid = wait_for_process(launcher, run_dir, victim)  # before that, the steps may be those of the killed run
            wait_for_step(launcher, run_dir, step)
            os.kill(pid, signal.SIGKILL)
        code, text = finish(launcher, run_dir)
    assert code == 0, text
    nothing_is_left(run_dir)
    return text
