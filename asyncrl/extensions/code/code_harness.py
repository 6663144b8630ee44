"""Process that runs the tests, next to the one that holds the code of an answer. Sent into sandboxes as text.

The tests exist in the memory of this process only. The code runs in a separate process (code_candidate.py), a new one
for every test, which sees the arguments of a call and sends back plain data. It may therefore exit, print, replace
`assert` or `==`, walk the stack or read files without affecting a test. To forge the results it would need access to

    the memory of this process    not dumpable: no process of the same user may read or trace it (ptrace(2),
                                  PR_SET_DUMPABLE) without CAP_SYS_PTRACE, and the code's process has no capabilities
    its standard output           a descriptor that the code does not have and, for the same reason, cannot open under
                                  /proc; output begins with a nonce that arrived with the tests
    its imports                   limited to files that existed, unchanged, before the code ran

In asyncrl's own sandboxes the code cannot signal this process either: it runs in a sandbox of its own beside this one
(without isolation, as root: under another uid). Where it can end or stop this process there is no verdict, and code.py
handles that case.

in     on standard input, the sources of its modules in one line, then a payload (code.py)
out    one line: the nonce, a space, {"results": [...]} or {"fault": why}. A result is
       passed, failed, timeout, died (the code's process), raised (at import),
       unsupported (a test passes an object that is not plain data), invalid (a test is not Python, or imports a
       module that does not exist)
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import tempfile
import time
from typing import Any, BinaryIO

from asyncrl.extensions.code.code_process import (
    MOST_OUTPUT,
    CandidateDied,
    Clock,
    NotStarted,
    TimeLimitExpired,
    protect,
    started,
)
from asyncrl.extensions.code.code_values import Caught


def run_asserts(payload: dict[str, Any], test: str) -> str:
    """Return the result of a test that is Python code: it passes if nothing is raised."""
    tree = ast.parse(test)
    code = compile(tree, "test.py", "exec")
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    null = os.open(os.devnull, os.O_RDWR)
    candidate = started(payload, null, null, program=False)
    raised_at_import = True
    with Caught() as caught, Clock(payload["seconds"]) as clock:
        candidate.execute(payload["code"])
        raised_at_import = False
        namespace: dict[str, Any] = {"__name__": "test"}
        for name in sorted(loaded - set(dir(builtins))):  # the code must not replace Python's builtins
            with Caught() as missing:
                namespace[name] = candidate.ask({"get": name})
            if isinstance(missing.error, (TimeLimitExpired, CandidateDied)):
                raise missing.error
        exec(code, namespace)
    clock.stop()
    candidate.close()
    os.close(null)
    return _result(candidate.problem, clock, "raised" if raised_at_import else "failed", caught.error)


def run_program(payload: dict[str, Any], test: dict[str, str]) -> str:
    """Return the result of a program with this input. It must exit with 0 and write this output; whitespace at the ends
    of lines and empty lines at the end are ignored."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:  # sandboxes may refuse memfd_create
        stdin.write(test["input"].encode())
        stdin.seek(0)
        candidate = started(payload, stdin.fileno(), stdout.fileno(), program=True)
        exit_code = 1
        with Caught() as caught, Clock(payload["seconds"]) as clock:
            candidate.begin(payload["code"])
            exit_code = candidate.wait()
        clock.stop()
        candidate.close()
        stdout.seek(0)
        same = _lines(stdout.read(MOST_OUTPUT).decode(errors="replace")) == _lines(test["output"])
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


class Before:
    """Finds modules as the given finders do, except files created or changed since its creation (st_ctime cannot be
    forged)."""

    def __init__(self, finders: list[Any]) -> None:
        self._finders, self._since = list(finders), time.time()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module. Raises ImportError for a file that the code has written."""
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        spec = next((one for one in found if one is not None), None)
        for file in (spec.origin, spec.cached) if spec else ():
            if file and os.path.exists(file) and os.stat(file).st_ctime >= self._since:
                raise ImportError(f"{file} was changed since the tests began")
        return spec


def import_all(test: str) -> None:
    """Import what a test imports at its top level. Raises what Python raises for invalid code or a missing module."""
    for node in ast.parse(test).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            importlib.import_module(node.module)


def run_all(payload: dict[str, Any]) -> list[str]:
    """Return the results in order, up to the first that is not passed if the payload asks for that."""
    programs = [not isinstance(test, str) for test in payload["tests"]]
    invalid = set()
    for number, test in enumerate(payload["tests"]):
        with Caught() as caught:
            if not programs[number]:
                import_all(test)
        if caught.error:
            invalid.add(number)
    sys.meta_path[:] = [Before(sys.meta_path)]
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
            if isinstance(caught.error, NotStarted) and not results:
                raise caught.error  # no code has run yet, so it is not the code's fault
            if caught.error:
                results.append("died")  # earlier code exhausted the sandbox, or its output our memory
        if payload["until_one_fails"] and results[-1] != "passed":
            break
    return results


def main(channel: BinaryIO) -> None:
    """Read the payload and write one line, whatever happens."""
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
    os._exit(0)  # do not wait for threads that a test started
