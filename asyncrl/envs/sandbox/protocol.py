"""What a sandbox is to whoever uses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    reason: str  # "exited", "timeout", ...
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        """It exited, with 0."""
        return self.reason == "exited" and self.exit_code == 0


class Sandbox(Protocol):
    """One, for one episode or less."""

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float | None = None,
        env: Mapping[str, str] = {},
    ) -> Outcome:
        """Run a command to its end, or for so many seconds."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        ...

    async def read(self, path: str) -> bytes:
        """Read a file."""
        ...

    async def close(self) -> None:
        """End all that runs in it."""
        ...


class SandboxBackend(Protocol):
    """Where sandboxes come from."""

    async def open(self) -> Sandbox:
        """A new one. Raises EpisodeFailed("sandbox")."""
        ...

    async def close(self) -> None:
        """Close all of them."""
        ...
