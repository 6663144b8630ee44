"""Child processes report their status, keep bounded output, and leave nothing of their group."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from contextlib import closing
from subprocess import PIPE

import psutil
import pytest

from asyncrl.extensions.children import processes
from asyncrl.extensions.children.processes import (
    KEPT_BYTES,
    ChildProcess,
    OversizedMessage,
    WorkerPool,
    describe,
    framed,
    messages,
    received,
)


def python(code: str, **options: object) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], **options)


def test_lines_go_both_ways_and_the_status_is_told() -> None:
    async def main() -> None:
        with closing(python("print(input()[::-1]); raise SystemExit(3)", stdin=PIPE, stdout=PIPE)) as process:
            writer, reader = await process.writer(), await process.reader()
            writer.write(b"abc\n")
            assert await reader.read() == b"cba\n"
            assert await process.wait() == 3

    asyncio.run(main())


def test_group_is_killed_when_its_leader_exits() -> None:
    async def main() -> None:
        code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
        with closing(python(code, stdout=PIPE)) as process:
            tail = await process.tail()
            assert await process.wait() == 0
            await asyncio.wait_for(tail.ended, 10)  # `sleep` held the pipe
            assert int(tail.data)

    asyncio.run(main())


def test_end_kills_who_ignores_what_can_be_ignored() -> None:
    async def main() -> None:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(99)"
        with closing(python(code, stdout=PIPE)) as process:
            assert await (await process.reader()).readline() == b"on\n"
            assert await process.wait(0.01) is None
            assert await process.end() == -signal.SIGKILL
            assert await process.end() == -signal.SIGKILL  # a second time, it does nothing

    asyncio.run(main())


def test_tail_keeps_the_end_of_any_output() -> None:
    async def main() -> str:
        code = f"import sys; sys.stderr.write('a' * {5 * KEPT_BYTES} + '\\nlast but one\\nlast')"
        with closing(python(code, stderr=PIPE)) as process:
            tail = await process.tail("stderr")
            await process.wait()
            await tail.ended
            assert len(tail.data) == KEPT_BYTES
            return tail.last_lines(2, 100)

    assert asyncio.run(main()) == "last but one\nlast"


def test_error_while_its_pipes_are_connected_ends_the_program() -> None:
    async def main() -> None:
        process = python("import time; time.sleep(99)", stdin=PIPE, stdout=PIPE)

        async def connect() -> None:
            async with process.ended_on_error():
                await process.writer()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await connect()
        assert await process.wait(0) == -signal.SIGKILL

    asyncio.run(main())


def test_program_that_cannot_be_watched_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def refused(pid: int) -> int:
        started.append(pid)
        raise OSError("too many open files")

    async def main() -> None:
        monkeypatch.setattr(processes.os, "pidfd_open", refused)
        with pytest.raises(OSError, match="too many"):
            python("import time; time.sleep(99)")
        assert not psutil.pid_exists(started[0])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with status 0"), (-11, "was killed by SIGSEGV"), (None, "did not die within 5 s of SIGKILL")],
)
def test_status_in_words(status: int | None, words: str) -> None:
    assert describe(status) == words


# -- messages --------------------------------------------------------------------------------------------------

SAID = [{"text": "\u00e9", "data": b"\x00\n", "numbers": [1, 0.5, None]}, [], "x" * 100_000]


def test_child_reads_whole_messages_and_ends_with_a_cut_one() -> None:
    sent = b"".join(map(framed, SAID))
    assert list(messages(io.BytesIO(sent))) == SAID
    for cut in (1, 3, 70_000):
        assert list(messages(io.BytesIO(sent[:-cut]))) == SAID[:2]


def test_a_parent_reads_messages_up_to_its_limit() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(framed(SAID[0]) + framed(SAID[2]))
        reader.feed_eof()
        assert await received(reader, 1000) == SAID[0]
        with pytest.raises(OversizedMessage, match="its answer has 100005 bytes, more than the limit of 1000"):
            await received(reader, 1000)

    asyncio.run(main())


def test_a_pool_returns_what_a_worker_said_before_it_ended() -> None:
    worker = (
        "import sys\nfrom asyncrl.extensions.children.processes import framed, messages\n"
        "for request in messages(sys.stdin.buffer):\n"
        "    end = framed({'done': request['n']}) if request['n'] else b''\n"
        "    sys.stdout.buffer.write(framed({'stage': 1}) + end)\n"
        "    sys.stdout.flush()\n"
        "    if not request['n']: sys.exit(7)\n"
    )

    async def main() -> None:
        pool = WorkerPool([sys.executable, "-c", worker], 1)
        for number, status in ((2, None), (0, 7), (3, None)):
            reply = await pool.ask({"n": number}, "done", 60.0)
            assert (reply.exit_code, reply.late) == (status, False)
            assert reply.messages == [{"stage": 1}, *([{"done": number}] if number else [])]
        await pool.close()

    asyncio.run(main())
