"""How a program on a machine of the job answers the launcher: by a line of JSON, and within its deadline."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "asyncrl-preflight "
"""Begins the line: modules and prologs print, too."""
SAID = 300
"""Characters."""


def tell(answer: dict[str, Any]) -> None:
    """At once: others write to the same end."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def end_after(seconds: float, answer: dict[str, Any]) -> None:
    """Give this answer and end the process, whatever it waits for, unless it has ended before. By a thread: a signal
    would wait until a library's call returns."""

    def late() -> None:
        tell(answer)
        os._exit(0)  # a thread of a library may hold whatever a clean end waits for

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()


def heard(outputs: Sequence[str], names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Answers by machine. For those of `names` that gave none, the end of whatever else was printed."""
    found, rest = {}, []
    for line in (line for output in outputs for line in output.splitlines()):
        _, mark, text = line.partition(MARK)
        try:
            answer = json.loads(text) if mark else None
        except ValueError:  # cut short
            answer = None
        if answer is None:
            rest.append(line)
        else:
            found[str(answer["node"])] = answer
    said = " ".join(" ".join(rest).split())[-SAID:]
    silent = {"problem": "no answer" + (f"; the last that was said: {said}" if said else "")}
    return {name: {"node": name, **silent} for name in names if name not in found} | found
