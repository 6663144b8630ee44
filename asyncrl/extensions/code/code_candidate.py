"""Process that holds the code of an answer and calls it for the tests. Its source is sent into sandboxes as text.

Nothing that comes from this process is trusted once that code has run: the harness (code_harness.py) treats whatever
arrives on the pipe as data that a function returned. The tests never enter this process; only the arguments of their
calls do.

in     {"program": bool, "memory": bytes, "output": bytes}, {"code": text}; then, unless it is a program, any number of
       {"get": name}, {"iterate": number}, {"call": number, "args": packed, "kwargs": packed},
       {"attribute": [number, name]}
out    {"ready": capabilities}, which must be 0; then, unless it is a program, one reply to each message from the code
       on: {"value": packed} or {"raised": [class names, text]}
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from collections.abc import Callable
from itertools import islice
from typing import Any, BinaryIO, TextIO

from asyncrl.extensions.code.code_values import KEPT, Caught, pack, unpack

MOST_ITEMS = 1_000_000
ROOM = 1 << 20
"""Bytes of memory that must remain free for the code."""


class CandidateModule:
    """The module that the code defines, and the objects in it that the tests refer to by number."""

    def __init__(self) -> None:
        self._module = types.ModuleType("candidate")
        sys.modules["candidate"] = self._module
        self._kept: list[Any] = []

    def execute(self, code: str) -> Any:
        """Execute the code as an imported module: a block under `if __name__ == "__main__"` does not run."""
        exec(compile(code, "candidate.py", "exec"), self._module.__dict__)
        return self._packed(None)

    def answer(self, request: dict[str, Any]) -> Any:
        """Return what a test asked for, packed. Raises what the code raises."""
        if "code" in request:
            return self.execute(request["code"])
        if "get" in request:
            return self._packed(getattr(self._module, request["get"]))
        if "attribute" in request:
            number, name = request["attribute"]
            return self._packed(getattr(self._kept[number], name))
        if "iterate" in request:
            items = iter(self._kept[request["iterate"]])
            return self._packed(list(islice(items, MOST_ITEMS)))
        args, kwargs = unpack(request["args"], self._held), unpack(request["kwargs"], self._held)
        return self._packed(self._kept[request["call"]](*args, **kwargs))

    def _held(self, number: int) -> Any:
        return self._kept[number]

    def _packed(self, value: Any) -> Any:
        return pack(value, self._keep)

    def _keep(self, value: Any) -> list[Any]:
        self._kept.append(value)
        return [KEPT, len(self._kept) - 1]


def main(channel: BinaryIO) -> None:
    """Serve requests until the other side closes its end."""
    out = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    settings = json.loads(channel.readline())
    limit(settings["memory"], settings["output"])
    program = settings["program"]
    out.write(json.dumps({"ready": capabilities()}) + "\n")
    if program:
        code = json.loads(channel.readline())["code"]
        out.close()
        channel.close()
        sys.argv = ["main.py"]
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
        return
    candidate = CandidateModule()
    for line in channel:
        told(out, candidate.answer, json.loads(line))


def limit(memory: int, output: int) -> None:
    """Limit the memory of this process and the files that it writes, permanently. Raises MemoryError if that leaves no
    room."""
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, output), (resource.RLIMIT_CORE, 0)):
        there = resource.getrlimit(kind)[1]  # the hard limit of the sandbox, which cannot be raised from inside
        most = most if there == resource.RLIM_INFINITY else min(most, there)
        resource.setrlimit(kind, (most, most))
    bytes(ROOM)


def told(out: TextIO, function: Callable[[Any], Any], argument: Any) -> None:
    """Write what a call returns or raises as a reply."""
    value = ""
    with Caught() as caught:
        value = json.dumps({"value": function(argument)})
    if caught.error is not None:
        names = [kind.__name__ for kind in type(caught.error).__mro__]
        value = json.dumps({"raised": [names, str(caught.error)[:1000]]})
    out.write(f"{value}\n")


def capabilities() -> int:
    """Return the process's effective capabilities (capabilities(7)): with any it could read the memory of other
    processes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
