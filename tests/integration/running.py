"""Runs the command as a user would, and reads what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT = 300.0


@contextmanager
def start(run_dir: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """asyncrl-train experiment=tiny with these overrides, its output in run_dir.out; ended when the block is left."""
    command = [sys.executable, "-m", "asyncrl.launch.main", "experiment=tiny", f"run.dir={run_dir}", *overrides]
    with run_dir.with_suffix(".out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def finish(process: subprocess.Popen[str], run_dir: Path, timeout: float = TIMEOUT) -> tuple[int, str]:
    """Exit code and output."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run did not end within {timeout} s:\n{output(run_dir)[-3000:]}") from None
    return code, output(run_dir)


def output(run_dir: Path) -> str:
    """What the command printed so far."""
    return run_dir.with_suffix(".out").read_text()


def run(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """A run that must succeed; its step records."""
    with start(run_dir, *overrides) as process:
        code, text = finish(process, run_dir)
    assert code == 0, text
    return lines(run_dir / "metrics.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file, or nothing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout: float = TIMEOUT) -> None:
    """Until the run has trained `step` batches."""
    deadline = time.monotonic() + timeout
    while len(lines(run_dir / "metrics.jsonl")) < step:
        assert process.poll() is None, f"the run ended before step {step}:\n{output(run_dir)}"
        assert time.monotonic() < deadline, f"no step {step} within {timeout} s:\n{output(run_dir)}"
        time.sleep(0.1)


def processes_of(run_dir: Path) -> dict[str, int]:
    """Process ids of a run by name, found by its id in their environment: only those that the launcher started."""
    run_id = json.loads((run_dir / "addresses.json").read_text())["run_id"]
    found = {}
    for pid in pids_carrying(run_id):
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environ = dict(
            entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in entry
        )
        for module, name in (
            (b"asyncrl.engine.serve", "engine"),
            (b"sglang::router", "router"),
            (b"asyncrl.rollout", "rollout"),
        ):
            if module in argv:
                found[name] = pid
        if b"asyncrl.trainer" in argv:
            found[f"trainer-{environ[b'RANK'].decode()}"] = pid
    return found


def pids_carrying(run_id: str) -> list[int]:
    """Living processes of a run, whatever their parents."""
    mark = f"ASYNCRL_RUN_ID={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def nothing_is_left(run_dir: Path) -> None:
    """No process of the run lives, and no shared memory of dead processes stays."""
    run_id = json.loads((run_dir / "addresses.json").read_text())["run_id"]
    deadline = time.monotonic() + 10
    while (left := pids_carrying(run_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left if Path(f"/proc/{pid}").exists()
    ]
    assert not left, f"left behind: {commands}"
