"""A program's output is what the model is told, whatever the program does; only a sandbox that fails is a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox.protocol import Outcome
from asyncrl.extensions.tools.output import cut, middle_out, shown
from asyncrl.extensions.tools.python import PythonTool
from asyncrl.extensions.tools.tool import ToolError
from tests.extensions.tools.sandboxes import Folders
from tests.extensions.tools.waits import eventually


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every sandbox is closed."""
    Folders.opened.clear()
    yield
    assert [one for one in Folders.opened if one.path.exists()] == []


def run(*programs: str, **options: Any) -> list[str]:
    async def script(tool: PythonTool) -> list[str]:
        return [await tool.call({"code": code}) for code in programs]

    return play(script, **options)


def play(script: Callable[[PythonTool], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        tool = PythonTool(Folders, **options)
        try:
            async with asyncio.timeout(60):
                return await script(tool)
        finally:
            await tool.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(1)\nx = 2\nx + 1", "1\n3"),
        ("print('a'); None", "a"),
        ("x = 1", "[no output]"),
        ("", "[no output]"),
        ("import sys; print('out'); sys.exit(3)", "out\n[exit code 3]"),
        ("if __name__ == '__main__':\n    print(sum(n for n in range(4)))", "6"),
        ("def f(n):\n    return n and f(n - 1)\nf(3)", "0"),
        ("print('\\u00e4\\ud800'.encode('utf8', 'replace').decode())", "ä?"),
    ],
)
def test_program_is_a_cell(code: str, expected: str) -> None:
    assert run(code) == [expected]


def test_traceback_is_the_program_s_own_with_its_lines() -> None:
    (found,) = run("def half(x):\n    return x / 0\n\nprint('before')\nhalf(1)")
    head, last = found.split("\n", 1)
    assert head == "before"
    assert last.startswith('Traceback (most recent call last):\n  File "<program>", line 5, in <module>\n    half(1)')
    assert "    return x / 0" in last
    assert last.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    (found,) = run("1 +")
    assert "SyntaxError" in found


def test_files_stay_in_a_session_and_nowhere_else() -> None:
    write, read = "open('f', 'w').write('7') and None", "open('f').read()"
    assert run(write, read) == ["[no output]", "'7'"]
    assert "FileNotFoundError" in run(write, read, session=False)[1]


def test_session_has_one_sandbox_opened_when_needed() -> None:
    run("1", "2")
    assert len(Folders.opened) == 1
    run()
    run("1", "2", session=False)
    assert len(Folders.opened) == 3


def test_programs_of_a_session_wait_for_each_other() -> None:
    async def script(tool: PythonTool) -> list[str]:
        append = "open('f', 'a').write('x'); len(open('f').read())"
        return await asyncio.gather(*(tool.call({"code": append}) for _ in range(5)))

    assert sorted(play(script)) == ["1", "2", "3", "4", "5"]
    assert len(Folders.opened) == 1


def test_program_that_runs_out_of_time_is_told_so() -> None:
    assert run("import time\ntime.sleep(100)", seconds=0.5) == ["[it ran out of time]"]


def test_program_that_is_too_long_is_reported() -> None:
    with pytest.raises(ToolError, match="too much"):
        run("#" * (2 << 20))


def test_sandbox_that_fails_is_a_fault() -> None:
    async def script(tool: PythonTool) -> None:
        await tool.call({"code": "1"})
        await Folders.opened[0].close()
        await tool.call({"code": "1"})

    with pytest.raises(EpisodeFailed, match="sandbox: it is gone"):
        play(script)


@pytest.mark.parametrize("session", [True, False])
def test_cancelled_program_leaves_nothing(session: bool) -> None:
    async def script(tool: PythonTool) -> None:
        calling = asyncio.create_task(tool.call({"code": "open('f', 'w').close()\nimport time\ntime.sleep(100)"}))
        await eventually(lambda: Folders.opened and (Folders.opened[0].path / "f").exists())
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()

    play(script, session=session)


# --- outputs --------------------------------------------------------------------------------------------------


def ended(reason: Any = "exited", code: int | None = 0, out: bytes = b"", err: bytes = b"") -> Outcome:
    return Outcome(reason, code, out, err, 0.1)


@pytest.mark.parametrize("reason", ["timeout", "cpu", "memory", "processes", "disk", "output", "killed"])
def test_each_end_has_its_words(reason: str) -> None:
    assert shown(ended(reason, None, b"so far"), 100).startswith("so far\n[it ")


def test_output_is_bounded_in_the_middle_and_errors_at_their_end() -> None:
    found = shown(ended(code=1, out=b"a" * 1000 + b"z" * 1000, err=b"line\n" * 50 + b"Error: last"), 100)
    out, rest = found.split("\nine\n", 1)
    assert out == "a" * 50 + "\n[1900 characters are left out]\n" + "z" * 50
    assert rest.endswith("Error: last\n[exit code 1]")
    assert len(rest) < 120
    assert shown(ended(err=b"w\n" * 100), 1000) == "\n".join(["w"] * 20)
    assert middle_out("abcde", 5) == "abcde"
    assert middle_out("abcdef", 5) == "abc\n[1 characters are left out]\nef"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert shown(ended(out=b"\xff"), 10) == "\ufffd"
    assert cut("a\ud800", 10) == "a?"
