"""Processes of the run that live and do not go on: which, since when, and what each of them was doing.

A trainer rank that hangs takes all others along, which wait for it in a collective. So all are described: by what they
told last (progress.py), by the state that the kernel gives them, and by their Python stacks (py-spy, which needs no
answer of a process that is stopped; where it may not look, the process is asked to write its stacks to its log).
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

from asyncrl.leases import SUFFIX, Leases
from asyncrl.progress import FOLDER, TELL, renew_seconds

STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a disk or a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
"""Of /proc/PID/stat."""
PY_SPY_SECONDS = 10.0
ANSWER_SECONDS = 0.5
"""For a process that lives to write its stacks to its log."""
STACK_SECONDS = 30.0
"""For the stacks of all processes."""
SHOWN = 8
"""Processes that a message describes; of all others there are the files."""


@dataclass(frozen=True)
class Stalled:
    """A process that does not go on."""

    name: str
    doing: str
    """What it told last; "" where it never has."""
    seconds: float
    silent: bool
    """It does not even renew its file: it is stopped, or something holds the interpreter."""


class Stalls(Leases):
    """Of one run. What is counted is time in which the launcher could look: a run that is suspended as a whole, or a
    file system that does not answer, is nobody's fault."""

    def __init__(
        self, run_dir: Path, names: Sequence[str], patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience` in seconds: for which any of `names` may be silent."""
        super().__init__(run_dir / FOLDER, clock, patience, renew_seconds(patience))
        self._names_wanted, self._patience, self._not_begun = names, patience, dict.fromkeys(names, 0.0)
        for file in (run_dir / FOLDER).glob(f"*{SUFFIX}"):  # of an earlier life
            file.unlink(missing_ok=True)

    @property
    def names(self) -> Sequence[str]:
        """Of those that it looks at."""
        return self._names_wanted

    def find(self) -> list[Stalled]:
        """To be called again and again; it looks when it is time. Those that hang, the likely cause first."""
        now = self._clock()
        if now - self._looked_at < self._every:
            return []
        passed = min(now - self._looked_at, 2 * self._every)
        self.look()
        found = []
        for name, waited in list(self._not_begun.items()):
            if f"{name}{SUFFIX}" in self._seen:
                del self._not_begun[name]
            elif waited + passed < self._patience:
                self._not_begun[name] = waited + passed
            else:
                found.append(Stalled(name, "", waited + passed, silent=True))
        for name in self._names_wanted:
            if seen := self._seen.get(f"{name}{SUFFIX}"):
                still, silent = float(seen.told["seconds"]) + seen.unchanged, seen.unchanged >= self._patience
                if silent or still >= float(seen.told["within"]):
                    found.append(Stalled(name, seen.told["doing"], still, silent))
        return sorted(found, key=lambda one: (not one.silent, -one.seconds))

    def doing(self, name: str) -> str:
        """What a process told last, and how long ago it began that."""
        if (seen := self._seen.get(f"{name}{SUFFIX}")) is None:
            return "has told nothing"
        return f"{seen.told['doing']}, for {float(seen.told['seconds']) + seen.unchanged:.0f} s"

    def message(self, stalled: Sequence[Stalled], logs: Path) -> str:
        """For the user, once the stacks of all are written."""
        first = stalled[0]
        last = (
            f"the last that it told is {first.doing!r}" if first.doing else "it has told nothing since it was started"
        )
        lines = [
            f"{first.name} hangs: {last}, {first.seconds:.0f} s ago (cluster.stall_timeout, "
            f"{self._patience:g} s; set it higher if this may take so long)",
            f"what each was doing (stacks: {logs}/*.stack, or at the end of the logs):",
        ]
        order = [*(one.name for one in stalled), *(n for n in self._names_wanted if n not in {s.name for s in stalled})]
        for name in order[:SHOWN]:
            stack = stack_file(logs, name)
            told = stack.read_text(errors="replace").splitlines() if stack.exists() else []
            state = told[0] if told else "does not answer"
            lines.append(f"  {name}: {state}; {self.doing(name)}{innermost(told)}")
        more = len(order) - SHOWN
        return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def stack_file(logs: Path, name: str) -> Path:
    """Where the stack of a process is written, the kernel's state in its first line."""
    return logs / f"{name}.stack"


def write_stack(pid: int, path: Path) -> None:
    """Describe a process that may be stopped, or wait for a device for ever: it need not answer."""
    text = f"{state(pid)}\n{_stack(pid)}"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def state(pid: int) -> str:
    """In words."""
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
        os.kill(pid, TELL)
    return f"({problem}: it was asked to write its stacks to its log)\n"


def innermost(stack: Sequence[str]) -> str:
    """Of the main thread, as py-spy writes it."""
    pids = [line.split()[1].rstrip(":") for line in stack if line.startswith("Process ")]
    starts = tuple(f"Thread {pid} " for pid in pids)
    main = next((place for place, line in enumerate(stack) if starts and line.startswith(starts)), None)
    if main is None or main + 1 >= len(stack):
        return ""
    return f"; in {stack[main + 1].strip()}"
