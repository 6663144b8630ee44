"""The owner's end of a sandbox, over a worker that the test plays: whose answer is whose, what ends a sandbox."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox import session
from asyncrl.extensions.sandbox.protocol import Limits, Outcome
from asyncrl.extensions.sandbox.session import LocalSandbox, WorkerProcess
from asyncrl.extensions.sandbox.worker import LENGTHS, Header, frame

DEADLINE = 60.0


class Worker:
    """The other end of the socket, and the process."""

    def __init__(self) -> None:
        self.removed = 0
        self.killed = self.stuck = self._hung_up = False
        self._ends: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    def sandbox(self, limits: Limits) -> LocalSandbox:
        ours, theirs = socket.socketpair()
        connecting = asyncio.ensure_future(asyncio.open_unix_connection(sock=theirs))
        connecting.add_done_callback(lambda done: self._ends.set_result(done.result()))
        return LocalSandbox(cast(WorkerProcess, self), ours, limits, self._remove)

    async def _remove(self) -> None:
        self.removed += 1

    def kill(self) -> None:
        self.killed = True

    async def ended(self) -> str:
        reader: Any = (await self._ends)[0]
        while not self.killed and (self.stuck or not (self._hung_up or reader._eof)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return "it fell over"

    async def hear(self) -> tuple[Header, bytes]:
        reader, _ = await self._ends
        head, size = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
        data = await reader.readexactly(head + size)
        return json.loads(data[:head]), data[head:]

    async def connected(self) -> None:
        await self._ends

    async def say(self, header: Header, body: bytes = b"") -> None:
        (await self._ends)[1].write(frame(header, body))

    async def hang_up(self) -> None:
        self._hung_up = True
        _, writer = await self._ends
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def with_a_sandbox(test: Callable[[LocalSandbox, Worker], Awaitable[None]]) -> None:
    """Run a test of one that has come up."""

    async def main() -> None:
        worker = Worker()
        async with asyncio.timeout(DEADLINE):
            opening = asyncio.ensure_future(worker.sandbox(Limits(file_mb=1)).ready())
            await asyncio.sleep(0)
            await worker.say({"ready": True})
            sandbox = await opening
            try:
                await test(sandbox, worker)
            finally:
                await sandbox.close()
                await worker.hang_up()

    asyncio.run(main())


def answer(stdout: bytes = b"") -> tuple[Header, bytes]:
    return {"reason": "exited", "exit_code": 0, "seconds": 0.5, "split": len(stdout)}, stdout


def begin(request: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(request)


def test_request_and_outcome_cross_whole() -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        running = begin(sandbox.run(["a", "é\udcff"], stdin=b"\0in", seconds=3.0, env={"A": "1"}))
        heard = {"do": "run", "command": ["a", "é\udcff"], "env": {"A": "1"}, "seconds": 3.0}
        assert await worker.hear() == (heard, b"\0in")
        await worker.say({"reason": "exited", "exit_code": 3, "seconds": 0.5, "split": 2}, b"out of it")
        assert await running == Outcome("exited", 3, b"ou", b"t of it", 0.5)

    with_a_sandbox(test)


def test_call_takes_no_longer_than_the_limits_say() -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        for seconds, heard in ((None, 10.0), (1000.0, 10.0), (0.5, 0.5)):
            running = begin(sandbox.run(["a"], seconds=seconds))
            header, _ = await worker.hear()
            assert header["seconds"] == heard
            await worker.say(*answer())
            await running

    with_a_sandbox(test)


@pytest.mark.parametrize(
    "request_",
    [
        lambda sandbox: sandbox.run([]),
        lambda sandbox: sandbox.run([""]),
        lambda sandbox: sandbox.run("ls"),
        lambda sandbox: sandbox.run(["a\0b"]),
        lambda sandbox: sandbox.run(["a"], env={"A=B": "1"}),
        lambda sandbox: sandbox.run(["a"], env={"": "1"}),
        lambda sandbox: sandbox.run(["a"], seconds=-1.0),
        lambda sandbox: sandbox.run(["a"], stdin=b"x" * ((1 << 20) + 1)),
        lambda sandbox: sandbox.write("a", b"x" * ((1 << 20) + 1)),
        lambda sandbox: sandbox.write("../a", b""),
        lambda sandbox: sandbox.read("/etc/passwd"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_asked(
    request_: Callable[[LocalSandbox], Awaitable[object]],
) -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        with pytest.raises(ValueError):
            await request_(sandbox)
        assert sandbox.usable

    with_a_sandbox(test)


def test_cancelled_call_is_stopped_and_answers_nobody() -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        first, second = begin(sandbox.run(["first"])), begin(sandbox.run(["second"]))
        assert (await worker.hear())[0]["command"] == ["first"]
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await worker.hear() == ({"do": "stop"}, b"")
        await worker.say(*answer(b"of the first"))
        assert (await worker.hear())[0]["command"] == ["second"]
        await worker.say(*answer(b"of the second"))
        assert (await second).text == "of the second"

    with_a_sandbox(test)


def test_cancelled_waiting_call_is_never_made() -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        first, second, third = (begin(sandbox.run([word])) for word in ("first", "second", "third"))
        await worker.hear()
        second.cancel()
        await worker.say(*answer())
        await first
        assert (await worker.hear())[0]["command"] == ["third"]
        await worker.say(*answer())
        assert (await third).ok

    with_a_sandbox(test)


@pytest.mark.parametrize(
    ("said", "raised", "text"),
    [
        ({"refused": "'a' goes through a link"}, ValueError, "goes through a link"),
        ({"errno": 2, "text": "No such file"}, FileNotFoundError, "No such file"),
        ({"errno": 28, "text": "No space left"}, OSError, "No space left"),
    ],
)
def test_answers_that_are_no_fault_leave_the_sandbox_usable(said: Header, raised: type[Exception], text: str) -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        reading = begin(sandbox.read("a"))
        assert (await worker.hear())[0]["most"] == 1 << 20
        await worker.say(said)
        with pytest.raises(raised, match=text):
            await reading
        assert sandbox.usable
        assert worker.removed == 0

    with_a_sandbox(test)


@pytest.mark.parametrize("how", ["fault", "hang up", "silence", "closed"])
def test_fault_of_the_sandbox_fails_the_episode_and_ends_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.05 if how == "silence" else 60.0)

    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        running, waiting = begin(sandbox.run(["a"], seconds=0.01)), begin(sandbox.run(["b"]))
        await worker.hear()
        if how == "fault":
            await worker.say({"fault": "cannot start a process"})
        elif how == "hang up":
            await worker.hang_up()
        elif how == "closed":
            await sandbox.close()
        expected = {"fault": "cannot start", "hang up": "it fell over", "silence": "did not answer", "closed": "closed"}
        with pytest.raises(EpisodeFailed, match=f"sandbox: .*{expected[how]}"):
            await running
        with pytest.raises(EpisodeFailed, match="sandbox: "):
            await waiting
        assert not sandbox.usable
        with pytest.raises(EpisodeFailed, match="sandbox: "):
            await sandbox.write("a", b"")
        await sandbox.close()
        assert (worker.removed, worker.killed, sandbox.removed) == (1, False, True)

    with_a_sandbox(test)


def test_vanished_worker_fails_the_next_request_of_any_size() -> None:
    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        await worker.hang_up()
        with pytest.raises(EpisodeFailed, match="sandbox: it fell over"):
            await sandbox.write("a", b"x" * (1 << 20))
        assert not sandbox.usable

    with_a_sandbox(test)


@pytest.mark.parametrize("how", ["hang up", "silence", "cancelled"])
def test_sandbox_that_does_not_come_up_is_removed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "OPEN_SECONDS", 0.1 if how == "silence" else 60.0)

    async def main() -> None:
        worker = Worker()
        sandbox = worker.sandbox(Limits())
        opening = begin(sandbox.ready())
        await asyncio.sleep(0)
        if how == "hang up":
            await worker.hang_up()
        elif how == "cancelled":
            await worker.connected()
            opening.cancel()
        errors = {"hang up": "it fell over", "silence": "did not start within 0 s", "cancelled": None}
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else EpisodeFailed, match=errors[how]):
            await asyncio.wait_for(opening, DEADLINE)
        await sandbox.close()
        assert worker.removed == 1
        await worker.hang_up()

    asyncio.run(main())


def test_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_SECONDS", 0.1)

    async def test(sandbox: LocalSandbox, worker: Worker) -> None:
        worker.stuck = True
        await sandbox.close()
        assert (worker.removed, worker.killed) == (1, True)

    with_a_sandbox(test)
