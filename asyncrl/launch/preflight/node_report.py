"""Reports of a program on a machine of the job to the launcher: one line of JSON, within its deadline."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "asyncrl-preflight "
"""Prefix of the line, because modules and prologs print as well."""
NODE = "ASYNCRL_NODE"
"""Environment variable with the name of the machine (Cluster.everywhere)."""
SAID = 300
"""Maximum number of characters quoted from other output."""


def node_name() -> str:
    """Return the name of this machine."""
    return os.environ.get(NODE) or os.uname().nodename


def emit(answer: dict[str, Any]) -> None:
    """Print the report in a single write, since other tasks write to the same stream."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def end_after(seconds: float, answer: dict[str, Any]) -> None:
    """Print this report and exit after so many seconds, whatever the process is waiting for, unless it has ended
    before. A thread does this, because a signal handler would have to wait until a library call returns."""

    def late() -> None:
        emit(answer)
        os._exit(0)  # a library's thread may hold what a clean exit would wait for

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()


def parse(outputs: Sequence[str], names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Parse the reports by machine. Machines in `names` without a report get a problem that quotes the end of the other
    output."""
    found, rest = {}, []
    for line in (line for output in outputs for line in output.splitlines()):
        _, mark, text = line.partition(MARK)
        try:
            answer = json.loads(text) if mark else None
        except ValueError:  # truncated
            answer = None
        if answer is None:
            rest.append(line)
        else:
            found[str(answer["node"])] = answer
    said = " ".join(" ".join(rest).split())[-SAID:]
    silent = {"problem": "no answer" + (f"; the last output: {said}" if said else "")}
    return {name: {"node": name, **silent} for name in names if name not in found} | found
