"""One call, as the supervisor sees it: starts the program, feeds and reads its pipes, ends it and all that it started.

waits for     the program's end, its output, room in its stdin, the word to stop; at most TICK_SECONDS for any of them
on a hang     SIGKILL to everything in the sandbox after `seconds`
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.envs.sandbox.beside import BESIDE, serve
from asyncrl.envs.sandbox.guest import Confinement, become
from asyncrl.envs.sandbox.meter import TICK_SECONDS, Meter

_CHUNK = 65536


class Fault(Exception):
    """The sandbox's own."""


@dataclass
class Ended:
    """How, before the owner hears of it."""

    reason: str
    exit_code: int | None
    seconds: float
    outputs: tuple[bytes, bytes]


@dataclass
class _Output:
    end: int
    most: int
    data: bytearray = field(default_factory=bytearray)

    def take(self) -> bool | None:
        """Some of what is there: None when nothing is, False when nothing will be, or it is too much."""
        try:
            chunk = os.read(self.end, _CHUNK)
        except BlockingIOError:
            return None
        self.data += chunk
        return bool(chunk) and not self.too_much

    @property
    def too_much(self) -> bool:
        return len(self.data) > self.most


class Call:
    """A program under way."""

    def __init__(
        self,
        confinement: Confinement,
        home: int,
        command: Sequence[str],
        env: dict[str, str],
        stdin: bytes,
        seconds: float,
    ) -> None:
        """Starts it in the folder of this descriptor. Raises OSError when it cannot be started."""
        pairs = [os.pipe() for _ in range(4)]
        (guest_in, self._feed), (out, guest_out), (err, guest_err), (self._fault, fault) = pairs
        given = [guest_in, guest_out, guest_err]
        if confinement.nested:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            env = {**env, BESIDE: str(len(given))}
            given.append(theirs.detach())
            with ours:
                if os.fork() == 0:
                    for end in (*given, self._feed, out, err, self._fault, fault):
                        os.close(end)
                    serve(ours, confinement, home)
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self.pid = os.fork()
        if self.pid == 0:
            become(confinement, home, command, env, given, fault)
        for end in (*given, fault):
            os.close(end)
        for end in (self._feed, out, err):
            os.set_blocking(end, False)
        most = int(confinement.limits["output_kb"]) * 1024
        self._outputs = [_Output(out, most), _Output(err, most)]
        self._stdin = memoryview(stdin)
        self._alive = os.pidfd_open(self.pid)
        self._status: int | None = None

    def wait(self, meter: Meter, owner: socket.socket, guardian: int, stopped: Callable[[], bool]) -> str:
        """Until it has to end, and why; `stopped` is asked when the owner speaks or the guardian is gone."""
        poll = select.poll()
        for end in (self._alive, owner.fileno(), guardian, *(output.end for output in self._outputs)):
            poll.register(end, select.POLLIN)
        poll.register(self._feed, select.POLLOUT)
        outputs = {output.end: output for output in self._outputs}
        next_tick = self._began + TICK_SECONDS
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                return "timeout"
            for end, _ in poll.poll(max(0.0, 1000 * (min(self._deadline, next_tick) - now))):
                if end == self._alive:
                    return "exited"
                if end in (owner.fileno(), guardian) and stopped():
                    return "killed"
                if end == self._feed and not self._pour():
                    poll.unregister(end)
                    os.close(end)
                    self._feed = -1
                if end in outputs and outputs[end].take() is False:
                    if outputs[end].too_much:
                        return "output"
                    poll.unregister(end)
            if time.monotonic() >= next_tick:
                while self._reap(os.WNOHANG):
                    pass
                if reason := meter.broken():
                    return reason
                next_tick = time.monotonic() + TICK_SECONDS

    def end(self, reason: str, meter: Meter, kill: Callable[[], None]) -> Ended:
        """Kill all of it, and take what it still had to say. Raises Fault when it never began."""
        kill()
        while self._reap(0):
            while self._reap(os.WNOHANG):
                pass
            kill()  # whoever began meanwhile: nothing can where the kernel kills all at once
        seconds = time.monotonic() - self._began
        for output in self._outputs:
            while output.take():
                pass
        if fault := os.read(self._fault, _CHUNK):
            raise Fault(fault.decode(errors="replace"))
        self._close()
        reason, exit_code = self._verdict(reason, meter)
        out, err = (bytes(output.data[: output.most]) for output in self._outputs)
        return Ended(reason, exit_code, seconds, (out, err))

    def _close(self) -> None:
        for end in (self._feed, self._fault, self._alive, *(output.end for output in self._outputs)):
            if end >= 0:
                os.close(end)

    def _verdict(self, reason: str, meter: Meter) -> tuple[str, int | None]:
        if reason != "exited":
            return reason, None
        if meter.out_of_memory():
            return "memory", None
        if any(output.too_much for output in self._outputs):
            return "output", None
        code = os.waitstatus_to_exitcode(self._status) if self._status is not None else -signal.SIGKILL
        if code == -signal.SIGXCPU:
            return "cpu", None
        return ("exited" if code >= 0 else "killed"), code

    def _reap(self, flags: int) -> bool:
        """Whether a process was; orphans come to the supervisor too."""
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return False
        if pid == self.pid:
            self._status = status
        return pid != 0

    def _pour(self) -> bool:
        """Whether there is more to write to stdin, and somebody to read it."""
        try:
            self._stdin = self._stdin[os.write(self._feed, self._stdin[:_CHUNK]) :] if self._stdin else self._stdin
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._stdin)
