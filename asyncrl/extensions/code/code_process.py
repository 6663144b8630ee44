"""The code's process as the harness sees it: how to start it and talk to it. Sent into sandboxes as text.

asyncrl's own sandboxes start it in a second sandbox beside that of the harness (sandbox/worker.py); in others it
is a child of the harness. code_harness.py explains what isolates the two, and how strongly.

waits for     the process, within a Clock
on a hang     TimeLimitExpired
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from asyncrl.extensions.code.code_values import KEPT, Caught, pack, unpack

BOOT = """
import json, os, sys, types
channel = os.fdopen(int(sys.argv[1]), "rb")
names, sources = zip(*json.loads(channel.readline()))
for name, source in zip(names, sources):
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
sys.modules[names[-1]].main(channel)
"""
PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 3, 4, 1, 24, 38
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
BESIDE = "ASYNCRL_BESIDE"
"""Environment variable with the descriptor of a socket to the worker of the sandbox beside this one."""
START_SECONDS = 30.0
"""Time in which the code's process must start, before it is given the code."""
MOST_OUTPUT = 64 << 20
"""Number of bytes that a program may write."""


class TimeLimitExpired(BaseException):
    """The time limit of a test has passed. Not an Exception, because tests may catch those."""


class Unsupported(BaseException):
    """A test passes the code an object that is not plain data."""


class CandidateDied(BaseException):
    """The code's process has ended."""


class KeptObject:
    """An object that the code returned and that is not plain data. It can be passed back, called and iterated, and its
    attributes can be read."""

    def __init__(self, candidate: CandidateProcess, number: int) -> None:
        self._candidate, self._number = candidate, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = {"args": self._candidate.packed(args), "kwargs": self._candidate.packed(kwargs)}
        return self._candidate.ask({"call": self._number, **packed})

    def __iter__(self) -> Any:
        return iter(self._candidate.ask({"iterate": self._number}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._candidate.ask({"attribute": [self._number, name]})


class NotStarted(BaseException):
    """The code's process could not be started, before it was given the code."""


class SandboxedPython:
    """Python process with BOOT that the worker of the sandbox beside this one starts on request. `ends` are its
    descriptors 0, 1 and 2, then those whose numbers are passed as arguments."""

    def __init__(self, env: dict[str, str], ends: tuple[int, ...]) -> None:
        numbers = [str(place) for place in range(3, len(ends))]
        order = {"command": [sys.executable, "-I", "-c", BOOT, *numbers], "env": env}
        self._stream, theirs = socket.socketpair()
        with theirs, socket.socket(fileno=os.dup(int(os.environ[BESIDE]))) as worker:
            socket.send_fds(worker, [json.dumps(order).encode()], [theirs.fileno(), *ends])

    def wait(self) -> int:
        """Return its exit code. Raises OSError when it could not be started."""
        with self._stream.makefile("rb") as answers:
            line = answers.readline()
        answer = json.loads(line) if line else {"code": -signal.SIGKILL}
        if "fault" in answer:
            raise OSError(answer["fault"])
        return int(answer["code"])

    def end(self) -> None:
        """End it with all processes that it started."""
        self._stream.shutdown(socket.SHUT_WR)
        while self._stream.recv(4096):
            pass
        self._stream.close()


class ChildPython:
    """The same as a child of this process, for sandboxes that have none beside them."""

    def __init__(self, env: dict[str, str], ends: tuple[int, ...]) -> None:
        stdin, stdout, stderr, *others = ends
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOT, *map(str, others)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=others,
            start_new_session=True,
            preexec_fn=confine,
            env=env,
        )

    def wait(self) -> int:
        """Return its exit code."""
        return self._process.wait()

    def end(self) -> None:
        """Kill it and all processes that are still in its session."""
        with Caught():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class CandidateProcess:
    """The code's process as the tests see it."""

    def __init__(self, payload: dict[str, Any], stdin: int, stdout: int, program: bool) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        env = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        start = SandboxedPython if BESIDE in os.environ else ChildPython
        self._process = start(env, (stdin, stdout, null, theirs_in, theirs_out))
        for end in (null, theirs_in, theirs_out):
            os.close(end)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self.problem = ""  # a result that takes precedence over that of the test
        self._send(payload["modules"])
        self._send({"program": program, "memory": payload["memory_mb"] << 20, "output": MOST_OUTPUT})
        if self._receive()["ready"] != 0:
            raise PermissionError("the code's process has capabilities")

    def begin(self, code: str) -> None:
        """Send the code. A program sends no reply."""
        self._send({"code": code})

    def execute(self, code: str) -> None:
        """Execute the code, which defines its functions. Raises what it raises."""
        self.ask({"code": code})

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the code's reply to a request. Raises what the code raised if that is a builtin exception, else
        RuntimeError."""
        self._send(request)
        reply = self._receive()
        if "raised" in reply:
            raise _exception(*reply["raised"])
        return unpack(reply["value"], lambda number: KeptObject(self, int(number)))

    def packed(self, value: Any) -> list[Any]:
        """Pack the arguments of a test's call."""
        return pack(value, self._kept)

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        return self._process.wait()

    def close(self) -> None:
        """End the process."""
        for stream in (self._out, self._in):
            with Caught():
                stream.close()
        self._process.end()

    def _kept(self, value: Any) -> list[Any]:
        if not isinstance(value, KeptObject):
            self.problem = "unsupported"
            raise Unsupported(type(value).__name__)
        return [KEPT, value._number]

    def _send(self, message: Any) -> None:
        try:
            self._out.write(json.dumps(message).encode() + b"\n")
            self._out.flush()
        except BrokenPipeError:
            self._lost()

    def _receive(self) -> Any:
        line = self._in.readline(MOST_OUTPUT)
        return json.loads(line) if line.endswith(b"\n") else self._lost()

    def _lost(self) -> Any:
        self.problem = "died"
        raise CandidateDied


class Clock:
    """Context manager that raises TimeLimitExpired in its body after `seconds`, repeatedly in case that is caught."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.expired = False

    def __enter__(self) -> Clock:
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds, 0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the timer. Call this again after the context: it may have fired while it was being stopped."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        self.expired = True
        raise TimeLimitExpired


def started(payload: dict[str, Any], stdin: int, stdout: int, program: bool) -> CandidateProcess:
    """Start the code's process, without the code. Raises NotStarted; the start does not count against a test's time
    limit, and its failure is not the code's fault."""
    found: list[CandidateProcess] = []
    with Caught() as caught, Clock(START_SECONDS) as clock:
        found.append(CandidateProcess(payload, stdin, stdout, program))
    clock.stop()
    if not found:
        raise NotStarted(f"{type(caught.error).__name__}: {caught.error}")
    return found[0]


def protect() -> str:
    """Make this process inaccessible to the code. Returns the reason if that fails, else an empty string."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return "" if libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0 else "the harness cannot be made non-dumpable"


def confine() -> None:
    """Confine the code's process before it executes anything. New namespaces take away its access to all other
    processes of the same user: it can neither read nor signal them. Where namespaces cannot be created it runs without
    capabilities; it can then signal the harness, but not read it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        inside = os.fork()  # only children enter the new process namespace
        if inside:
            os.closerange(0, 1024)  # includes the pipe by which Popen learns that the child has started
            os._exit(int(os.waitpid(inside, 0)[1] != 0))
    elif libc.unshare(CLONE_NEWUSER) != 0 and os.geteuid() == 0:
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exception(names: list[str], text: str) -> Exception:
    """Build the closest builtin exception."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with Caught():
                return kind(text)
    return RuntimeError(f"{names[0]}: {text}")
