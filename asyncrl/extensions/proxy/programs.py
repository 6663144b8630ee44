"""Execution of users' programs that does not block the event loop and keeps a bounded part of their output.

waits for     the program's exit
on a hang     waits without a deadline; cancelling `run` kills the process group
leaves        nothing of the process group (children/processes.py)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.children.processes import ChildProcess, OutputTail, describe

LAST_LINES, LAST_CHARACTERS = 10, 2000
FLUSH_SECONDS = 2.0
"""Deadline for the rest of the output after the group was killed. A process outside the group may hold a pipe open
forever."""


def reaching(host: str, python: Path) -> dict[str, str]:
    """Return the variables with which a program reaches a host without a proxy, and finds this python first."""
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    return {"no_proxy": direct, "NO_PROXY": direct, "PATH": path}


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program that has ended."""

    status: int  # as in subprocess: negative if a signal killed it
    stdout: bytes  # its last bytes
    stderr: OutputTail

    @property
    def reason(self) -> str:
        """Description of the exit status."""
        return describe(self.status)

    def last_lines(self) -> str:
        """Return the last lines of stderr."""
        return self.stderr.last_lines(LAST_LINES, LAST_CHARACTERS) or "(it wrote nothing to stderr)"


async def run(argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: Path | None = None) -> ProgramResult:
    """Run a program to its end. Raises OSError when it does not start, and EpisodeFailed when it survives SIGKILL."""
    with closing(_start(argv, stdin, env, cwd)) as child:
        try:
            stdout, stderr = await child.tail("stdout"), await child.tail("stderr")
            await child.wait()
        finally:
            status = await child.end()
        if status is None:
            raise EpisodeFailed("agent_error", f"{argv[0]} {describe(status)}")
        await asyncio.wait([stdout.ended, stderr.ended], timeout=FLUSH_SECONDS)
        return ProgramResult(status, bytes(stdout.data), stderr)


def _start(argv: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: Path | None) -> ChildProcess:
    """Start the program. Its stdin is a file in memory, so a program that does not read all of it cannot block us."""
    with open(os.memfd_create("stdin"), "w+b") as given:
        given.write(stdin)
        given.seek(0)
        return ChildProcess(argv, stdin=given, stdout=PIPE, stderr=PIPE, env=dict(env), cwd=cwd)
