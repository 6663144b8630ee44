"""What a sandbox is to whoever uses one; backends implement it, agents and rewards write against it.

    backend = LocalSandboxes(limits, warm=8)
    sandbox = await backend.open()
    try:
        await sandbox.write("data.txt", b"1 2 3")
        outcome = await run_python(sandbox, "print(sum(map(int, open('data.txt').read().split())))")
        # outcome.reason == "exited", outcome.ok, outcome.text == "6\n"
    finally:
        await sandbox.close()

A program that fails, hangs or is killed is an Outcome. EpisodeFailed("sandbox", ...) is a fault of the sandbox itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

Reason = Literal["exited", "timeout", "cpu", "memory", "processes", "disk", "output", "killed"]
"""Why a call ended.

exited      by itself
killed      by a signal that no limit sent, or because the task that awaited it was cancelled
otherwise   the limit that it broke; `processes` and `disk` end a call only where the kernel cannot refuse what is
            beyond them, elsewhere the program sees EAGAIN and ENOSPC
"""
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Limits:
    """Of one sandbox."""

    seconds: float = 10.0  # wall time of a call
    cpu_seconds: float = 10.0  # of all processes of a call
    memory_mb: int = 512  # MiB, of all of its processes where the backend can bound that, else of each
    processes: int = 32  # at once; every thread counts as one
    file_mb: int = 16  # MiB, largest file, largest stdin
    disk_mb: int = 64  # MiB, all of its folder, of /tmp and of /dev/shm together
    output_kb: int = 256  # KiB, of stdout and of stderr; what goes beyond ends the call

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be above 0, not {value}")


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    reason: Reason
    exit_code: int | None  # of `exited`; the negative number of the signal for `killed`, if one is known; else None
    stdout: bytes  # up to the limit
    stderr: bytes
    seconds: float  # wall time

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.reason == "exited" and self.exit_code == 0

    @property
    def text(self) -> str:
        """stdout, with U+FFFD for what is no UTF-8."""
        return self.stdout.decode(errors="replace")


class Sandbox(Protocol):
    """One, of one episode at a time. Its operations wait for each other.

    Its folder is where commands start. Files stay from call to call, processes do not: when the command ends, all that
    it started is killed.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
    ) -> Outcome:
        """Run a program, found on the sandbox's PATH; exit codes 126 and 127 are those of a shell.

        `seconds` shortens the limit of this call; `env` goes on top of the sandbox's own environment. A call whose
        task is cancelled is killed. Raises ValueError for what is no command, EpisodeFailed("sandbox", ...).
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and its folders, relative to the sandbox's folder.

        Raises ValueError for a path that leaves the folder or goes through a link and for too much data; OSError for
        what a program can have brought about (ENOSPC, EISDIR, ENOTDIR); EpisodeFailed("sandbox", ...).
        """
        ...

    async def read(self, path: str) -> bytes:
        """A file of the sandbox's folder.

        Raises ValueError for a path that leaves the folder or goes through a link, for what is no file and for one
        above file_mb; OSError (FileNotFoundError and the like); EpisodeFailed("sandbox", ...).
        """
        ...

    async def close(self) -> None:
        """Kill what runs and remove the folder. May be called again."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes."""

    async def open(self) -> Sandbox:
        """A clean one. Raises EpisodeFailed("sandbox", ...) where there is none to be had."""
        ...

    async def close(self) -> None:
        """Closes its sandboxes too."""
        ...


async def run_python(sandbox: Sandbox, source: str, stdin: bytes = b"") -> Outcome:
    """Run a Python program."""
    return await sandbox.run(["python3", "-c", source], stdin=stdin)
