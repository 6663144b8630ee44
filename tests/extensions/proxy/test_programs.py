"""A program's output and its end are told, and nothing of its group outlives it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from asyncrl.extensions.children.processes import KEPT_BYTES
from asyncrl.extensions.proxy import programs
from asyncrl.extensions.proxy.programs import ProgramResult
from tests.agents.talking import DEADLINE, alive, dead

ENV = {"PATH": os.environ["PATH"]}


def run(code: str, stdin: bytes = b"", cwd: Path | None = None) -> ProgramResult:
    async def main() -> ProgramResult:
        async with asyncio.timeout(DEADLINE):
            return await programs.run([sys.executable, "-c", code], stdin=stdin, env={**ENV, "X": "y"}, cwd=cwd)

    return asyncio.run(main())


def test_program_reads_its_question_and_is_read(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.environ['X'], os.getcwd()); print('no', file=sys.stderr)"
    ended = run(code, b"12", tmp_path)
    assert (ended.status, ended.stdout.decode(), ended.last_lines()) == (0, f"12 y {tmp_path}\n", "no")


def test_program_that_fails_tells_how() -> None:
    ended = run("raise KeyError('x')")
    assert (ended.status, ended.reason) == (1, "exited with status 1")
    assert ended.last_lines().splitlines()[-1] == "KeyError: 'x'"
    ended = run("import os; os.kill(os.getpid(), 9)")
    assert (ended.status, ended.reason) == (-9, "was killed by SIGKILL")
    assert ended.last_lines() == "(it wrote nothing to stderr)"


def test_long_output_is_kept_from_its_end() -> None:
    size = 20 * KEPT_BYTES
    ended = run(f"import sys; sys.stderr.write('a' * {size} + 'b'); sys.stdout.write('c' * {size} + 'd')")
    assert ended.stdout == b"c" * (KEPT_BYTES - 1) + b"d"
    assert ended.stderr.data == b"a" * (KEPT_BYTES - 1) + b"b"
    assert len(ended.last_lines()) == programs.LAST_CHARACTERS


def test_what_it_started_is_killed_when_it_ends() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    pid = int(run(code).stdout)
    asyncio.run(dead(pid))


def test_who_left_the_group_and_holds_its_pipe_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FLUSH_SECONDS", 0.05)
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    pid = int(run(code).stdout)
    assert alive(pid)
    os.kill(pid, 9)


def test_abandoned_program_is_killed_with_its_children(tmp_path: Path) -> None:
    """It ignores what can be ignored."""
    told = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(told) + '.new'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(told) + '.new'!r}, {str(told)!r}); time.sleep(1000)"
    )

    async def main() -> None:
        running = asyncio.create_task(programs.run([sys.executable, "-c", code], stdin=b"", env=ENV))
        async with asyncio.timeout(DEADLINE):
            while not told.exists():  # noqa: ASYNC110  nothing tells
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await dead(*map(int, told.read_text().split()))

    asyncio.run(main())


def test_no_descriptor_is_left() -> None:
    async def main() -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        for code in ("pass", "raise ValueError"):
            await programs.run([sys.executable, "-c", code], stdin=b"1", env=ENV)
        with pytest.raises(FileNotFoundError):
            await programs.run(["/no/such/program"], stdin=b"1", env=ENV)
        await asyncio.sleep(0)
        assert sorted(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())
