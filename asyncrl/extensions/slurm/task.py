"""A wrapper around one process of a run on its machine, as started by srun: python -m
asyncrl.extensions.slurm.task FILE.

FILE describes what to start; the launcher wrote it on the shared file system. srun forwards signals: SIGUSR1 asks the
process to stop, SIGUSR2 requests its stack; SIGTERM to srun makes Slurm kill the step at once. Everything that the
process leaves behind on this machine is cleaned up.

waits for     FILE, on a slow file system; then the process; and the lease of the launcher (leases.py), whose machine
              may have failed: Slurm would keep the others, and what runs there, until the time limit of the job
deadline      FILE_SECONDS; after SIGUSR1, the launcher's grace; slurm.lost_timeout
on death      of the launcher: ends, and has the job requeued or cancelled. Of the process: notes it with the
              machine's name, and exits with the same code (128 + n for signal n)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncrl import jsonl
from asyncrl.launch.leftovers import Scratch, die_with_parent, signal_group
from asyncrl.launch.stalls import stack_file, write_stack
from asyncrl.leases import RENEW_SECONDS, Leases
from asyncrl.progress import DUMP_SIGNAL, begin_file, end_file

FILE_SECONDS = 120.0
COMMAND_SECONDS = 60.0
MARK = "ASYNCRL_TASK"
COUNTED_SECONDS = 2 * RENEW_SECONDS
"""Time between two reads of the launcher's lease, and the most that is counted for one: if more has passed, the reader
may have been suspended together with the writer."""
MISSED = 3
"""Number of consecutive reads that must miss a lease before it counts as ended. A single one may coincide with a
rename."""


@dataclass(frozen=True)
class SlurmTask:
    """Description of what to start."""

    name: str
    run_id: str
    argv: list[str]
    env: dict[str, str]
    stop_signal: int
    grace: float
    """Seconds from the stop signal to SIGKILL."""
    run_dir: str
    """The run folder, for notes of the process's beginning and end (progress.py) and its stack (launch/stalls.py)."""
    ranks: list[dict[str, str]] = field(default_factory=list)
    """If it is started several times: the additional environment of each, by SLURM_PROCID."""
    lease: str = ""
    """The file that the launcher renews."""
    lost_timeout: float = 0.0
    """Seconds without renewal after which the launcher counts as lost."""
    look_seconds: float = COUNTED_SECONDS
    """Seconds between two checks of the lease."""
    orphaned: list[str] = field(default_factory=list)
    """A Slurm command that one of the tasks runs when the launcher is lost."""

    def write(self, path: Path) -> None:
        """Write the description. Only its owner may read it, because the environment holds the run's API key."""
        partial = path.with_name(path.name + ".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> SlurmTask:
        """Read a description. Raises FileNotFoundError if it does not appear within FILE_SECONDS."""
        deadline = time.monotonic() + FILE_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            os.listdir(path.parent)  # makes NFS refresh its cache
            time.sleep(0.5)
        return cls(**json.loads(path.read_text()))


class Watched(Leases):
    """Reader of one lease, whose owner must outlive the reader.

    It reads only this file, because thousands of processes may watch it.
    """

    def __init__(
        self,
        path: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        every: float = COUNTED_SECONDS,
    ) -> None:
        """Create a reader of a lease that expires after `seconds` without renewal. It reads every `every` seconds."""
        super().__init__(path.parent, clock, seconds)
        self._look_every = every
        self._name, self._missed, self._was_there = path.name, 0, False

    def _names(self) -> set[str]:
        return {self._name} if (self._folder / self._name).exists() else set()

    def ended(self) -> bool:
        """Return whether the lease existed and has ended. Call it repeatedly; it reads the file when a read is due."""
        if self._clock() - self._looked_at < self._look_every:
            return False
        if self.look():
            self._was_there, self._missed = True, 0
        else:
            self._missed += 1
        return self._was_there and self._missed >= MISSED


def main(path: Path) -> int:
    """Start the process, wait for its end, and clean up. Return the exit code."""
    os.umask(0o077)
    task, rank = SlurmTask.read(path), int(os.environ.get("SLURM_PROCID", "0"))
    run_dir = Path(task.run_dir)
    name = f"{task.name}-{rank}" if task.ranks else task.name
    mine = {**task.env, **(task.ranks[rank] if task.ranks else {})}
    mark = f"{task.run_id}/{name}"
    stopping: list[float] = []
    asked_to_tell: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: stopping.append(time.monotonic()))
    signal.signal(DUMP_SIGNAL, lambda *_: asked_to_tell.append(True))
    scratch = Scratch(mark, MARK)
    child = subprocess.Popen(
        task.argv,
        env={**os.environ, **mine, **scratch.environment, MARK: mark},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_prepare,
    )
    jsonl.replace(begin_file(run_dir, name), {"node": node(), "pid": child.pid})
    launcher = Watched(Path(task.lease), task.lost_timeout, every=task.look_seconds) if task.lease else None
    asked = orphaned = False
    while child.poll() is None:
        if launcher and not orphaned and launcher.ended():
            orphaned = True
            signal_group(child.pid, signal.SIGKILL)
        scratch.note([child.pid])
        if asked_to_tell:
            asked_to_tell.clear()
            write_stack(child.pid, stack_file(run_dir / "logs", name))
        if stopping and not asked:
            signal_group(child.pid, task.stop_signal)
            asked = True
        elif stopping and time.monotonic() > stopping[0] + task.grace:
            signal_group(child.pid, signal.SIGKILL)
        time.sleep(0.05)
    scratch.see([child.pid])
    signal_group(child.pid, signal.SIGKILL)  # what is left of its process group
    scratch.remove()
    code = child.returncode
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python removes its handlers before it exits
    if orphaned:
        _orphaned(task, path.parent)
    if code and not stopping:
        jsonl.replace(end_file(run_dir, name), {"name": name, "node": node(), "code": code, "at": time.time()})
    return code if code >= 0 else 128 - code


def _orphaned(task: SlurmTask, folder: Path) -> None:
    """Run the command `orphaned`. Only one of the job's tasks does so, once per incarnation of the job."""
    life = f"{os.environ.get('SLURM_JOB_ID', '')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    print(
        f"asyncrl: the launcher has not renewed the lease {task.lease} for {task.lost_timeout:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    try:
        os.close(os.open(folder / f"orphaned-{life}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    if task.orphaned:
        print(f"asyncrl: {' '.join(task.orphaned)}", file=sys.stderr, flush=True)
        subprocess.run(task.orphaned, timeout=COMMAND_SECONDS, check=False)


def _prepare() -> None:
    """Prepare the child. Slurm signals every process of a step, but SIGUSR1 and SIGUSR2 are for the task alone. If the
    task is killed, the process is killed with it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
    die_with_parent()


def node() -> str:
    """Return this machine's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
