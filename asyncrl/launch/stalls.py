"""Find processes that run but make no progress, and describe what every process of the run was doing.

A trainer rank that hangs blocks all other ranks in their next collective, so all of them are described: by their last
progress report (progress.py), by the process state that the kernel gives, and by their Python stacks. The stacks come
from py-spy, which can read a stopped process; where py-spy is not permitted, the process is asked to write its stacks
to its own log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl import jsonl
from asyncrl.leases import SUFFIX, Leases
from asyncrl.progress import DUMP_SIGNAL, FOLDER, renew_seconds

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (waiting for a disk or a device)",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
"""The states of /proc/PID/stat."""
PY_SPY_SECONDS = 10.0
ANSWER_SECONDS = 0.5
"""How long a running process may take to write its stacks to its log."""
STACK_SECONDS = 30.0
"""How long collecting the stacks of all processes may take."""
BEGIN_SECONDS = 120.0
"""How long at least a process may take until its first report: on a busy machine its imports take long."""
SHOWN = 8
"""How many processes an error message describes; the others have their files."""


@dataclass(frozen=True)
class Stalled:
    """A process that makes no progress."""

    name: str
    doing: str
    """Its last report; "" where there has been none."""
    seconds: float
    silent: bool
    """Whether it has even stopped renewing its file: it is stopped, or something holds Python's global lock."""


class Stalls(Leases):
    """The progress reports of one run. Only time in which the launcher could look counts, so a run that is suspended as
    a whole, or a file system that does not answer, is not reported as a stall."""

    def __init__(
        self,
        run_dir: Path,
        names: Sequence[str],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        begin: float = BEGIN_SECONDS,
    ) -> None:
        """`patience` is how many seconds any of the processes `names` may be silent; until its first report it may be
        silent for `begin` seconds if that is longer."""
        super().__init__(run_dir / FOLDER, clock, patience, renew_seconds(patience))
        self.names, self._patience, self._not_begun = names, patience, dict.fromkeys(names, 0.0)
        self._begin = max(begin, patience)
        for file in (run_dir / FOLDER).glob(f"*{SUFFIX}"):  # left by an earlier launcher of this run
            file.unlink(missing_ok=True)

    def find(self) -> list[Stalled]:
        """Return the processes that make no progress, the likely cause first. Meant to be polled: it reads the files
        only when a look is due."""
        now = self._clock()
        if now - self._looked_at < self._every:
            return []
        passed = min(now - self._looked_at, 2 * self._every)
        self.look()
        found = []
        for name, waited in list(self._not_begun.items()):
            if f"{name}{SUFFIX}" in self._seen:
                del self._not_begun[name]
            elif waited + passed < self._begin:
                self._not_begun[name] = waited + passed
            else:
                found.append(Stalled(name, "", waited + passed, silent=True))
        for name in self.names:
            if seen := self._seen.get(f"{name}{SUFFIX}"):
                still, silent = float(seen.told["seconds"]) + seen.unchanged, seen.unchanged >= self._patience
                if silent or still >= float(seen.told["within"]):
                    found.append(Stalled(name, seen.told["doing"], still, silent))
        return sorted(found, key=lambda one: (not one.silent, -one.seconds))

    def forget(self, name: str) -> None:
        """Begin anew with a process that is started again."""
        (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
        self._seen.pop(f"{name}{SUFFIX}", None)
        self._not_begun[name] = 0.0

    def last_report(self, name: str) -> str:
        """Return what a process reported last, and for how long it has been doing that."""
        if (seen := self._seen.get(f"{name}{SUFFIX}")) is None:
            return "no progress report"
        return f"{seen.told['doing']}, for {float(seen.told['seconds']) + seen.unchanged:.0f} s"

    def message(self, stalled: Sequence[Stalled], logs: Path) -> str:
        """Return the error message, once the stacks of all processes are written."""
        first = stalled[0]
        last = f"its last report is {first.doing!r}, {first.seconds:.0f} s ago"
        limit = f"cluster.stall_timeout ({self._patience:g} s)"
        if not first.doing:
            last = f"it has not reported any progress in the {first.seconds:.0f} s since it was started"
            limit += f", and at least {BEGIN_SECONDS:g} s for the first report"
        lines = [
            f"{first.name} makes no progress: {last}. The limit is {limit}; raise it if this step can take longer.",
            f"What each process was doing (stacks: {logs}/*.stack, or the end of its log):",
        ]
        names = [one.name for one in stalled]
        order = [*names, *(name for name in self.names if name not in names)]
        for name in order[:SHOWN]:
            stack = stack_file(logs, name)
            text = stack.read_text(errors="replace").splitlines() if stack.exists() else []
            lines.append(f"  {name}: {text[0] if text else 'unknown state'}; {self.last_report(name)}{innermost(text)}")
        more = len(order) - SHOWN
        return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def stack_file(logs: Path, name: str) -> Path:
    """Return the file for the stack of a process; its first line is the process state."""
    return logs / f"{name}.stack"


def write_stack(pid: int, path: Path) -> None:
    """Write the state and the stacks of a process. It need not respond: it may be stopped, or hang in a driver."""
    jsonl.replace_text(path, f"{state(pid)}\n{_stack(pid)}")


def state(pid: int) -> str:
    """Return the state of a process in words."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "dead"
    return STATES.get(letter, letter)


def _stack(pid: int) -> str:
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        problem = "py-spy is not installed"
    else:
        argv = [program, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
            if done.returncode == 0:
                return done.stdout
            problem = done.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
    return f"({problem}; the process was asked to write its stacks to its log)\n"


def innermost(stack: Sequence[str]) -> str:
    """Return the innermost frame of the main thread in py-spy's output, as the end of a sentence."""
    pids = [line.split()[1].rstrip(":") for line in stack if line.startswith("Process ")]
    starts = tuple(f"Thread {pid} " for pid in pids)
    main = next((place for place, line in enumerate(stack) if starts and line.startswith(starts)), None)
    if main is None or main + 1 >= len(stack):
        return ""
    return f"; in {stack[main + 1].strip()}"
