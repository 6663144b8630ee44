"""A sandbox that is only a folder, for quick tests: programs run with the rights of whoever tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox.protocol import Outcome


class Folder:
    def __init__(self, seconds: float) -> None:
        self.path, self._seconds = Path(tempfile.mkdtemp()), seconds
        self._turn = asyncio.Lock()

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", seconds: float | None = None, env: Mapping[str, str] = {}
    ) -> Outcome:
        if len(stdin) > 1 << 20:
            raise ValueError("too much")
        async with self._turn:
            if not self.path.exists():
                raise EpisodeFailed("sandbox", "it is gone")
            words = [sys.executable if command[0] == "python" else command[0], *command[1:]]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=self.path,
                start_new_session=True,
                env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(stdin), seconds or self._seconds)
            except TimeoutError:
                return Outcome("timeout", None, b"", b"", self._seconds)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            return Outcome("exited", process.returncode, out, err, 0.0)

    async def write(self, path: str, data: bytes) -> None:
        file = self.path / path
        if not self.path.exists():
            raise EpisodeFailed("sandbox", "it is gone")
        if file.is_symlink():
            raise ValueError("through a link")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    async def read(self, path: str) -> bytes:
        return (self.path / path).read_bytes()

    async def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Folders:
    """The backend."""

    opened: ClassVar[list[Folder]] = []
    ended: ClassVar[list[str]] = []

    def __init__(self, seconds: float = 30.0, *, name: str = "") -> None:
        self._seconds, self._name = seconds, name

    async def open(self) -> Folder:
        await asyncio.sleep(0)
        self.opened.append(Folder(self._seconds))
        return self.opened[-1]

    async def close(self) -> None:
        self.ended.append(self._name)
