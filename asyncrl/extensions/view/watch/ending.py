"""How a run ended: whether it goes on, and if it does not, the error and the lines of its logs that matter."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError, visible
from asyncrl.jsonl import opened
from asyncrl.network.addresses import END
from asyncrl.progress import FAILURE
from asyncrl.progress import FOLDER as PROGRESS

Document = Callable[[str], dict[str, Any] | None]
"""Returns a JSON file of a run."""
LOGS = "logs"
LOG_BYTES = 1 << 16
"""Bytes at the end of a log in which lines that matter are looked for."""
ERROR_CHARACTERS = 20_000
"""Length of an error."""
MOST_LINES = 24
"""Lines of one log."""
MOST_LOGS, MOST_SHOWN = 64, 3
"""Logs that are looked at, and those that are shown."""
TRACEBACK = "Traceback (most recent call last)"
CHAINED = "above exception"
"""Part of the lines with which Python joins tracebacks of causes."""
IN_GROUP = re.compile(r"^\s*\| ?")
"""What Python puts before the lines of exceptions in a group."""
MATTERS = re.compile(r"\b(?:\w*Error|\w*Exception|error|fatal|killed|out of memory|no space left)\b", re.IGNORECASE)
NAMED = re.compile(rf"/{LOGS}/([\w.-]+)\.log\b")


@dataclass(frozen=True)
class Ending:
    """How a run ended, or that it has not."""

    state: str
    """running; ended (as planned), paused, stopped or died; silent, if no launcher was ever seen."""
    error: str = ""

    @property
    def reason(self) -> str:
        """First line of the error, for lists."""
        return self.error.strip().partition("\n")[0]


def ending(document: Document, folder: Path, silent: float) -> Ending:
    """Return how a run ended. `silent` is for how many seconds it has shown no sign of life; 0 if not for long."""
    if (summary := document("summary.json")) is not None:
        return Ending("ended", str(summary.get("reason", "")))
    if told := document(END):
        state = told.get("state")
        return Ending(
            state if state in ("paused", "stopped") else "died", str(told.get("error", ""))[:ERROR_CHARACTERS]
        )
    if not silent:
        return Ending("running")
    if not (folder / "leases").is_dir():
        return Ending("silent")
    # The launcher could not record its end: it was killed, or the disk was full.
    causes = [
        f"{one.get('process')}: {one.get('error')}\n{one.get('place', '')}" for one in _failures(document, folder)
    ]
    for_long = f"{silent / 60:.0f} min" if silent < 7200 else f"{silent / 3600:.0f} h"
    lost = f"no sign of its launcher for {for_long}: it was killed, or its machine was lost"
    return Ending("died", "\n".join([*(cause[:ERROR_CHARACTERS].rstrip() for cause in causes[:1]), lost]))


def log_lines(folder: Path, error: str) -> list[str]:
    """Return the lines that matter of the logs that the error names, or else of those that hold an error: the last
    traceback, or the lines that tell of an error. Lines that the error quotes are left out."""
    named = list(dict.fromkeys(NAMED.findall(error)))
    files = [folder / LOGS / f"{name}.log" for name in named] or sorted((folder / LOGS).glob("*.log"))[:MOST_LOGS]
    found = list[str]()
    shown = 0
    for file in files:
        lines = _that_matter(_last_lines(file, folder), anyway=bool(named))
        if all(line.strip() in error for line in lines):
            continue
        found += [f"{LOGS}/{file.name}:", *(f"  {visible(line)}" for line in lines)]
        shown += 1
        if shown == MOST_SHOWN:
            break
    return found


def _failures(document: Document, folder: Path) -> list[dict[str, Any]]:
    """Return the errors that processes recorded, the first one first."""
    files = sorted((folder / PROGRESS).glob(f"*{FAILURE}"))[:MOST_LOGS]
    found = [one for file in files if (one := document(f"{PROGRESS}/{file.name}"))]
    return sorted(found, key=lambda one: float(one.get("time", 0.0)))


def _that_matter(lines: list[str], *, anyway: bool) -> list[str]:
    """Return the last traceback with those of its causes, or else the lines with an error, or else, if wanted `anyway`,
    the last lines. Of a long traceback the beginning, which is the first cause, and the end are returned."""
    lines = [IN_GROUP.sub("", line) for line in lines]
    begins = [place for place, line in enumerate(lines) if TRACEBACK in line]
    if begins:
        ends = next((place for place in range(begins[-1] + 1, len(lines)) if _ends_traceback(lines[place])), len(lines))
        first = begins.pop()
        while begins and any(CHAINED in line for line in lines[begins[-1] : first]):
            first = begins.pop()
        whole, half = lines[first : ends + 1], MOST_LINES // 2
        return whole if len(whole) <= MOST_LINES else [*whole[:half], "...", *whole[-half:]]
    found = [line for line in lines if MATTERS.search(line)]
    return found[-MOST_LINES:] or (lines[-MOST_LINES // 2 :] if anyway else [])


def _ends_traceback(line: str) -> bool:
    """Return whether this line of a traceback is the exception. Frames and groups of exceptions are indented."""
    return bool(line.strip()) and not line.startswith((" ", "\t", "+", "|"))


def _last_lines(file: Path, folder: Path) -> list[str]:
    """Return the lines at the end of a log; nothing if it cannot be read, or is no file of the run."""
    with suppress(OSError, RecordError), opened(file, folder) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
        return log.read(LOG_BYTES).decode(errors="replace").splitlines()
    return []
