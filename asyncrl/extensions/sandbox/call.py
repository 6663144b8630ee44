"""One call of a sandbox: runs a program, writes its stdin, reads its output, and kills it when it exceeds a limit.

This module is part of the worker (worker.py). It runs inside the sandbox and imports only the standard library.

waits for     the program's end, its output, space in its stdin, a message of the owner; at most TICK_SECONDS
on a hang     SIGKILL to everything in the sandbox after `seconds`
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from asyncrl.extensions.sandbox.program import MIB, WRITABLE, Settings, become, kill, others, proc_file, stat

TICK_SECONDS = 0.05
BYTES_PER_FILE = 4096
"""Bytes of disk_mb that each file counts for, because even empty files take memory."""
_CHUNK = 65536
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Fault(Exception):
    """A failure of the sandbox itself."""


class Meter:
    """Resource use of all processes of a call, for the limits that rlimits cannot enforce.

    With a control group, the kernel counts and enforces the memory limit itself. Without one, the meter sums over the
    processes in /proc.
    """

    def __init__(self, settings: Settings) -> None:
        """Begin a call. A bound is None if the kernel enforces it, or if nothing can."""
        limits, self._alone, self._oom, self._cpu = settings.limits, settings.alone, settings.oom, settings.cpu
        self._cpu_seconds = limits["cpu_seconds"]
        self._memory = limits["memory_mb"] * MIB if self._oom is None else None
        self._processes = None if settings.rlimit_processes and self._alone else limits["processes"]
        self._files = limits["disk_mb"] * MIB // BYTES_PER_FILE if self._alone else None
        self._ooms = _ooms(self._oom) if self._oom is not None else 0
        self._cpu_before = _cpu_of(self._cpu) if self._cpu is not None else 0.0

    def broken(self) -> str | None:
        """Return the name of a limit that the call exceeds now; None if it exceeds none."""
        if self.out_of_memory():
            return "memory"
        if self._cpu is not None and _cpu_of(self._cpu) - self._cpu_before > self._cpu_seconds:
            return "cpu"
        if self._cpu is None or self._memory is not None or self._processes is not None:
            living = others(self._alone)
            if self._processes is not None and len(living) > self._processes:
                return "processes"
            if self._cpu is None and sum(map(_cpu_seconds, living)) > self._cpu_seconds:
                return "cpu"
            if self._memory is not None and _memory(living, self._memory) > self._memory:
                return "memory"
        if self._files is not None:
            found = os.statvfs(WRITABLE)
            return "disk" if found.f_files - found.f_ffree > self._files else None
        return None

    def out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process for memory since the call began."""
        return self._oom is not None and _ooms(self._oom) > self._ooms


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    return sum(map(int, stat(pid)[11:15])) / _TICKS


def _ooms(descriptor: int) -> int:
    return _entry(os.pread(descriptor, 4096, 0), b"oom_kill")


def _cpu_of(descriptor: int) -> float:
    """Return the CPU seconds of a control group, including those of processes that have ended."""
    text = os.pread(descriptor, 4096, 0)
    return _entry(text, b"usage_usec") / 1e6 if b"usage_usec" in text else int(text) / 1e9


def _entry(text: bytes, name: bytes) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == name), 0)


def _memory(pids: Sequence[int], most: int) -> int:
    """Return resident bytes. If their sum exceeds `most`, count shared memory once (proportional set size)."""
    resident = {pid: int(proc_file(pid, "statm", "0 0").split()[1]) * _PAGE for pid in pids}
    if sum(resident.values()) <= most:
        return sum(resident.values())
    total = 0
    for pid in pids:
        lines = proc_file(pid, "smaps_rollup", "").splitlines()
        shares = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
        total += shares[0] if shares else resident[pid]
    return total


class _Output:
    def __init__(self, end: int, most: int) -> None:
        self.end, self.most, self.data = end, most, bytearray()

    def take(self) -> bool | None:
        """Read a chunk.

        Return True if data was read, None if there is none yet, False at the end or above the limit.
        """
        try:
            chunk = os.read(self.end, _CHUNK)
        except BlockingIOError:
            return None
        self.data += chunk
        return bool(chunk) and not self.too_much

    @property
    def too_much(self) -> bool:
        return len(self.data) > self.most


class Ended(NamedTuple):
    """Result of a call; see protocol.Outcome."""

    reason: str
    exit_code: int | None
    seconds: float
    outputs: Sequence[bytes]


class Call:
    """A running program."""

    def __init__(
        self,
        settings: Settings,
        home: int,
        command: Sequence[str],
        env: dict[str, str],
        seconds: float,
        *,
        stdin: bytes = b"",
        ends: Sequence[int] = (),
    ) -> None:
        """Start the program in the folder of the descriptor `home`. Raises OSError if it cannot be started.

        `ends` become the program's descriptors 0, 1, 2, ... Without `ends`, the program reads `stdin`, and its output
        is collected.
        """
        self._meter, self._alone = Meter(settings), settings.alone
        self._fault, fault = os.pipe()
        self._feed, self._outputs = -1, []
        given = list(ends)
        if not ends:
            (theirs_in, self._feed), (out, theirs_out), (err, theirs_err) = [os.pipe() for _ in range(3)]
            given = [theirs_in, theirs_out, theirs_err]
            most = int(settings.limits["output_kb"]) * 1024
            self._outputs = [_Output(out, most), _Output(err, most)]
            for end in (self._feed, out, err):
                os.set_blocking(end, False)
        shared = [] if settings.asks is None else [settings.asks]
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self.pid = os.fork()
        if self.pid == 0:
            become(settings, home, command, env, [*given, *shared], fault)
        for end in (fault, *({*given} - {*ends})):
            os.close(end)
        self._stdin = memoryview(stdin)
        self._alive = os.pidfd_open(self.pid)
        self._status: int | None = None

    def wait(self, interrupts: Collection[int]) -> str:
        """Wait until the call must end, and return the reason: "killed" when one of the `interrupts` becomes
        readable."""
        poll = select.poll()
        outputs = {output.end: output for output in self._outputs}
        for end in (self._alive, *interrupts, *outputs):
            poll.register(end, select.POLLIN)
        if self._feed >= 0:
            poll.register(self._feed, select.POLLOUT)
        next_tick = self._began + TICK_SECONDS
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                return "timeout"
            for end, _ in poll.poll(max(0.0, 1000 * (min(self._deadline, next_tick) - now))):
                if end == self._alive:
                    return "exited"
                if end in interrupts:
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
                if reason := self._meter.broken():
                    return reason
                next_tick = time.monotonic() + TICK_SECONDS

    def end(self, reason: str) -> Ended:
        """Kill all processes of the sandbox and read their remaining output.

        Raises Fault if the program could not be set up.
        """
        kill(self._alone)
        while self._reap(0):
            while self._reap(os.WNOHANG):
                pass
            kill(self._alone)  # processes that were forked meanwhile; in a pid namespace there are none
        seconds = time.monotonic() - self._began
        for output in self._outputs:
            while output.take():
                pass
        fault = os.read(self._fault, _CHUNK)
        for end in (self._feed, self._fault, self._alive, *(output.end for output in self._outputs)):
            if end >= 0:
                os.close(end)
        if fault:
            raise Fault(fault.decode(errors="replace"))
        reason, exit_code = self._verdict(reason)
        return Ended(reason, exit_code, seconds, [bytes(output.data[: output.most]) for output in self._outputs])

    def _verdict(self, reason: str) -> tuple[str, int | None]:
        if reason != "exited":
            return reason, None
        if self._meter.out_of_memory():
            return "memory", None
        if any(output.too_much for output in self._outputs):
            return "output", None
        code = os.waitstatus_to_exitcode(self._status) if self._status is not None else -signal.SIGKILL
        if code == -signal.SIGXCPU:
            return "cpu", None
        return ("exited" if code >= 0 else "killed"), code

    def _reap(self, flags: int) -> bool:
        """Reap one process, which may be an orphan. Return whether one was reaped."""
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return False
        if pid == self.pid:
            self._status = status
        return pid != 0

    def _pour(self) -> bool:
        """Write to stdin. Return whether data is left to write and the program still reads it."""
        try:
            self._stdin = self._stdin[os.write(self._feed, self._stdin[:_CHUNK]) :] if self._stdin else self._stdin
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._stdin)
