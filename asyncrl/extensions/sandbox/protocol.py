"""The interface of sandboxes, which backends implement and which agents and rewards use.

    backend = LocalSandboxes(limits, warm=8)
    sandbox = await backend.open()
    try:
        await sandbox.write("data.txt", b"1 2 3")
        outcome = await run_python(sandbox, "print(sum(map(int, open('data.txt').read().split())))")
        # outcome.reason == "exited", outcome.ok, outcome.text == "6\n"
    finally:
        await sandbox.close()

A program that fails, hangs or is killed yields an Outcome. EpisodeFailed("sandbox", ...) means that the sandbox failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

Reason = Literal["exited", "timeout", "cpu", "memory", "processes", "disk", "output", "killed"]
"""Why a call ended.

exited      the program exited by itself
killed      a signal that no limit sent ended it, or the task that awaited the call was cancelled
otherwise   the limit that the call exceeded. `processes` and `disk` end a call only where the kernel cannot refuse to
            exceed them; elsewhere the program sees EAGAIN or ENOSPC
"""
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox."""

    seconds: float = 10.0  # wall time of a call
    cpu_seconds: float = 10.0  # CPU time of all processes of a call
    memory_mb: int = 512  # MiB, of all processes together where the backend can bound that, else of each
    processes: int = 32  # processes at the same time; every thread counts as one
    file_mb: int = 16  # MiB, size of the largest file and of the largest stdin
    disk_mb: int = 64  # MiB, files in its folder, /tmp and /dev/shm together
    output_kb: int = 256  # KiB, of stdout and of stderr each; more than that ends the call

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be above 0, but is {value}")


@dataclass(frozen=True)
class Outcome:
    """Result of a call."""

    reason: Reason
    exit_code: int | None  # of `exited`; for `killed` the negative signal number, if known; else None
    stdout: bytes  # cut at the limit
    stderr: bytes
    seconds: float  # wall time

    @property
    def ok(self) -> bool:
        """Return whether the program exited with code 0."""
        return self.reason == "exited" and self.exit_code == 0

    @property
    def text(self) -> str:
        """Return stdout as text, with U+FFFD in place of invalid UTF-8."""
        return self.stdout.decode(errors="replace")


class Sandbox(Protocol):
    """A sandbox, used by one episode at a time. Its operations run one after another.

    Commands start in its folder. Files persist from call to call, processes do not: when the command ends, all
    processes that it started are killed.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
    ) -> Outcome:
        """Run a program, looked up on the sandbox's PATH. Exit codes 126 and 127 have the same meaning as in a shell.

        `seconds` shortens the limit of this call; `env` is added to the sandbox's own environment. If the task is
        cancelled, the call is killed. Raises ValueError for an invalid command, EpisodeFailed("sandbox", ...).
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and create its parent folders. The path is relative to the sandbox's folder.

        Raises ValueError for a path that leaves the folder or goes through a link, and for too much data; OSError for
        conditions that a program can cause (ENOSPC, EISDIR, ENOTDIR); EpisodeFailed("sandbox", ...).
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return the content of a file in the sandbox's folder.

        Raises ValueError for a path that leaves the folder or goes through a link, for anything but a regular file,
        and for a file larger than file_mb; OSError (FileNotFoundError and the like); EpisodeFailed("sandbox", ...).
        """
        ...

    async def close(self) -> None:
        """Kill all processes and remove the folder. It may be called more than once."""
        ...


class SandboxBackend(Protocol):
    """A source of sandboxes."""

    async def open(self) -> Sandbox:
        """Return a clean sandbox. Raises EpisodeFailed("sandbox", ...) if none can be started."""
        ...

    async def close(self) -> None:
        """Close the backend and all of its sandboxes."""
        ...


async def run_python(sandbox: Sandbox, source: str, stdin: bytes = b"") -> Outcome:
    """Run the source of a Python program in a sandbox."""
    return await sandbox.run(["python3", "-c", source], stdin=stdin)
