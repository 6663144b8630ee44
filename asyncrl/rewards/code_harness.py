"""The process that runs the tests, beside the one that holds the code of an answer. Sent into sandboxes as text.

The tests stand in the memory of this process alone. The code runs in a process of its own (code_candidate.py), a new
one for every test, which sees the arguments of a call and sends back plain data. It can therefore exit, print, replace
`assert` or `==`, walk the stack or read files, without a test taking notice; to say how the tests came out it would
need

    the memory of this process    not dumpable: no process of the same user may read or trace it (ptrace(2),
                                  PR_SET_DUMPABLE), but one with CAP_SYS_PTRACE, and the code's has no capabilities
    its standard output           a descriptor that the code has not, nor can open under /proc, for the same reason;
                                  what is written there begins with a nonce, which came with the tests
    its imports                   done before the code begins

What it can do is to end this process or stop it. Then there is no verdict, and code.py says what follows from that.

in     on standard input, the sources of its modules in one line, then a payload (code.py)
out    one line: the nonce, a space, {"results": [...]} or {"fault": why}. A result is
       passed, failed, timeout, died (the code's process), raised (at import),
       unsupported (a test hands over what is no plain data), invalid (a test is no Python, or imports what is not
       there)
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

from asyncrl.rewards.code_values import KEPT, Caught, pack, unpack

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
MOST_OUTPUT = 64 << 20
"""Bytes that a program may write."""


class Expired(BaseException):
    """The time of a test is over. Not an Exception: tests may catch those."""


class Unsupported(BaseException):
    """A test hands the code something that is no plain data."""


class Dead(BaseException):
    """The code's process has ended."""


class Kept:
    """What the code returned and is no plain data. It can be handed back, called, iterated and asked for attributes."""

    def __init__(self, candidate: Candidate, number: int) -> None:
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


class Candidate:
    """The code's process, as the tests see it."""

    def __init__(self, payload: dict[str, Any], stdin: int, stdout: int, program: bool) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOT, str(theirs_in), str(theirs_out)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            preexec_fn=lambda: confine(payload["memory_mb"] << 20),
            env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self.problem = ""  # a result that stands whatever the test made of it
        self._send(payload["modules"])
        self._send({"code": payload["code"], "program": program})
        if self._receive()["ready"] != 0:
            raise PermissionError("the code's process has capabilities")

    def ask(self, request: dict[str, Any]) -> Any:
        """What the code says to it. Raises what the code raised, if it is an exception of Python's own."""
        self._send(request)
        return self.answer()

    def answer(self) -> Any:
        """The next one."""
        reply = self._receive()
        if "raised" in reply:
            raise _exception(*reply["raised"])
        return unpack(reply["value"], lambda number: Kept(self, int(number)))

    def packed(self, value: Any) -> list[Any]:
        """Of a test's arguments."""
        return pack(value, self._kept)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait()

    def close(self) -> None:
        """End it, and whatever it started that is still of its session."""
        for stream in (self._out, self._in):
            with Caught():
                stream.close()
        with Caught():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _kept(self, value: Any) -> list[Any]:
        if not isinstance(value, Kept):
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
        raise Dead


class Clock:
    """Raises Expired in whatever is run within, and again should that be caught."""

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
        """To be called once more afterwards: it may have rung just as it was stopped."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        self.expired = True
        raise Expired


def run_asserts(payload: dict[str, Any], test: str) -> str:
    """The result of a test that is Python: it passes when nothing is raised."""
    tree = ast.parse(test)
    code = compile(tree, "test.py", "exec")
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    candidate, raised_at_import = None, True
    with Caught() as caught, Clock(payload["seconds"]) as clock:
        null = os.open(os.devnull, os.O_RDWR)
        candidate = Candidate(payload, null, null, program=False)
        candidate.answer()
        raised_at_import = False
        namespace: dict[str, Any] = {"__name__": "test"}
        for name in sorted(loaded - set(dir(builtins))):  # never what would stand in for Python's own
            with Caught() as missing:
                namespace[name] = candidate.ask({"get": name})
            if isinstance(missing.error, (Expired, Dead)):
                raise missing.error
        exec(code, namespace)
    clock.stop()
    if candidate is None:
        raise caught.error or RuntimeError("no process")
    candidate.close()
    return _result(candidate.problem, clock, "raised" if raised_at_import else "failed", caught.error)


def run_program(payload: dict[str, Any], test: dict[str, str]) -> str:
    """The result of a program with this input: it must end with 0 and write this output, but for white space at the
    ends of lines and empty lines at the end."""
    stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
    os.write(stdin, test["input"].encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    candidate, exit_code = None, 1
    with Caught() as caught, Clock(payload["seconds"]) as clock:
        candidate = Candidate(payload, stdin, stdout, program=True)
        exit_code = candidate.wait()
    clock.stop()
    if candidate is None:
        raise caught.error or RuntimeError("no process")
    candidate.close()
    os.lseek(stdout, 0, os.SEEK_SET)
    with os.fdopen(stdout, "rb") as written:
        same = _lines(written.read(MOST_OUTPUT).decode(errors="replace")) == _lines(test["output"])
    os.close(stdin)
    wrong = None if same and exit_code == 0 else ValueError("another output")
    return _result(candidate.problem, clock, "failed", caught.error or wrong)


def _result(problem: str, clock: Clock, otherwise: str, error: BaseException | None) -> str:
    if problem == "unsupported":
        return problem
    return "timeout" if clock.expired else problem or (otherwise if error else "passed")


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _exception(names: list[str], text: str) -> Exception:
    """The nearest of Python's own exceptions."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with Caught():
                return kind(text)
    return RuntimeError(f"{names[0]}: {text}")


def protect() -> str:
    """Out of reach for the code. Returns why not, if so."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return "" if libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0 else "the harness cannot be made not dumpable"


def confine(memory: int) -> None:
    """In the code's process, before it is executed. Namespaces of its own take its power over all other processes of
    the same user: it can neither read nor signal them. Where none may be made it keeps that of a user without
    capabilities, who cannot read this process, but can signal it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0:
        inside = os.fork()  # the namespace of processes begins with a child
        if inside:
            os.closerange(0, 1024)  # also what tells Popen that the child has begun
            os._exit(int(os.waitpid(inside, 0)[1] != 0))
    elif libc.unshare(CLONE_NEWUSER) != 0 and os.geteuid() == 0:
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT, MOST_OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def import_all(test: str) -> None:
    """What a test imports at its top. Raises what Python raises for what is no Python, or not there."""
    for node in ast.parse(test).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            importlib.import_module(node.module)


def run_all(payload: dict[str, Any]) -> list[str]:
    """The results in order, up to the first that is not passed if that is all that is asked."""
    programs = [not isinstance(test, str) for test in payload["tests"]]
    invalid = set()
    for number, test in enumerate(payload["tests"]):
        with Caught() as caught:
            if not programs[number]:
                import_all(test)
        if caught.error:
            invalid.add(number)
    sys.path.clear()  # what is imported from here on is what was there before the code was
    end = time.monotonic() + payload["total_seconds"]
    results: list[str] = []
    for number, test in enumerate(payload["tests"]):
        if number in invalid:
            results.append("invalid")
        elif time.monotonic() > end:
            results.append("timeout")
        else:
            with Caught() as caught:
                results.append((run_program if programs[number] else run_asserts)(payload, test))
            if caught.error and not results:
                raise caught.error  # no process can be started here
            if caught.error:
                results.append("died")  # none any more: what the code left behind takes up the sandbox
        if payload["until_one_fails"] and results[-1] != "passed":
            break
    return results


def main(channel: BinaryIO) -> None:
    """One line, whatever happens."""
    payload: dict[str, Any] = {"nonce": "", **json.loads(channel.read())}
    channel.close()
    verdict: dict[str, Any] = {"fault": protect()}
    if not verdict["fault"]:
        with Caught() as caught:
            verdict = {"results": run_all(payload)}
        if caught.error is not None:
            verdict = {"fault": f"{type(caught.error).__name__}: {caught.error}"}
    sys.stdout.write(f"{payload['nonce']} {json.dumps(verdict)}\n")
    sys.stdout.flush()
    os._exit(0)  # threads that a test started are not waited for
