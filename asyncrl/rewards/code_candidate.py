"""The process that holds the code of an answer and calls it for the tests. Sent into sandboxes as text.

Nothing that comes from here is trusted once that code has run: the other side (code_harness.py) takes what is written
to the pipe for data that a function returned. The tests are never here; the arguments of their calls are.

in     {"program": bool, "memory": bytes, "output": bytes}, {"code": text}; then, if it is none, any number of
       {"get": name}, {"iterate": number}, {"call": number, "args": packed, "kwargs": packed},
       {"attribute": [number, name]}
out    {"ready": capabilities}, which must be none; then to each, from the code of functions on, {"value": packed} or
       {"raised": [class names, text]}
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

from asyncrl.rewards.code_values import KEPT, Caught, pack, unpack

MOST_ITEMS = 1_000_000
ROOM = 1 << 20
"""Bytes that code needs at the least."""


class Candidate:
    """The module that the code makes, and what of it the tests hold by number."""

    def __init__(self) -> None:
        self._module = types.ModuleType("candidate")
        sys.modules["candidate"] = self._module
        self._kept: list[Any] = []

    def execute(self, code: str) -> Any:
        """As a module that is imported: what stands under `if __name__ == "__main__"` is left out."""
        exec(compile(code, "candidate.py", "exec"), self._module.__dict__)
        return self._packed(None)

    def answer(self, request: dict[str, Any]) -> Any:
        """What a test asked for, packed. Raises what the code raises."""
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
    """Until the other side closes its end."""
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
    candidate = Candidate()
    for line in channel:
        told(out, candidate.answer, json.loads(line))


def limit(memory: int, output: int) -> None:
    """The size of this process and of the files that it writes, for ever. Raises MemoryError when it leaves no room."""
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, output), (resource.RLIMIT_CORE, 0)):
        there = resource.getrlimit(kind)[1]  # the sandbox's, which nobody in it can raise
        most = most if there == resource.RLIM_INFINITY else min(most, there)
        resource.setrlimit(kind, (most, most))
    bytes(ROOM)


def told(out: TextIO, function: Callable[[Any], Any], argument: Any) -> None:
    """Answer with what a call returns or raises."""
    value = ""
    with Caught() as caught:
        value = json.dumps({"value": function(argument)})
    if caught.error is not None:
        names = [kind.__name__ for kind in type(caught.error).__mro__]
        value = json.dumps({"raised": [names, str(caught.error)[:1000]]})
    out.write(f"{value}\n")


def capabilities() -> int:
    """The process's effective ones (capabilities(7)): with them it could read the memory of others."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
