"""Check that this machine reaches the first one, and sees its folders: python -m asyncrl.launch.preflight.reach JSON.

The first machine listens and echoes what it receives; every other one connects and compares. Only machine names are
sent, nothing else of the run.

waits for     the other machines, which start at about the same time
deadline      `seconds` for all of it
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.launch.preflight.node_report import emit, end_after, node_name

AGAIN_SECONDS = 0.1
ONE_SECONDS = 5.0
"""Timeout of one connection."""
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Reach:
    """Parameters of the check, identical on every machine."""

    listener: str
    """Name of the first machine."""
    address: str
    port: int
    others: Sequence[str]
    seconds: float
    folders: Mapping[str, str]
    """For each folder, a file that the launcher created in it, whose content is its own name."""
    models: Mapping[str, int]
    """For each model folder, the size of its config.json."""

    def argv(self) -> list[str]:
        """Return the arguments of the program, after Python."""
        return ["-m", __name__, json.dumps(asdict(self))]


def main(reach: Reach) -> None:
    """Run the check and report the result. Always exits with 0: on any other exit code a cluster may kill
    the tasks that have not reported yet."""
    me, began = node_name(), time.monotonic()
    unseen = [folder for folder, file in reach.folders.items() if not _sees(Path(file))]
    unseen += [folder for folder, size in reach.models.items() if _size(Path(folder, "config.json")) != size]
    answer: dict[str, Any] = {"node": me, "unseen": unseen}
    late = f"the check did not finish within {reach.seconds:.0f} s"
    end_after(reach.seconds + GRACE_SECONDS, {**answer, "problem": late})
    try:
        if me == reach.listener:
            problem = _listen(reach, began + reach.seconds)
        else:
            problem = _connect(reach, me.encode(), began + reach.seconds)
    except OSError as error:
        problem = f"{reach.address}:{reach.port}: {error.strerror or error}"
    emit({**answer, "problem": problem, "seconds": time.monotonic() - began})


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _sees(file: Path) -> bool:
    try:
        return file.read_text() == file.name
    except OSError:
        return False


def _listen(reach: Reach, deadline: float) -> str:
    """Echo until all other machines have connected. Return the problem, or ""."""
    missing = set(reach.others)
    with socket.create_server((reach.address, reach.port), backlog=max(16, len(missing))) as server:
        while missing and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                end, _ = server.accept()
            except TimeoutError:
                break
            with end:
                end.settimeout(ONE_SECONDS)
                try:
                    name = _line(end)
                    end.sendall(name + b"\n")
                except OSError:
                    continue  # if it was a machine of the job, it retries
                missing.discard(name.decode(errors="replace"))
    return f"no connection came from {sorted(missing)}" if missing else ""


def _connect(reach: Reach, name: bytes, deadline: float) -> str:
    """Connect until the echo is correct, or until the deadline, because the listener may start later. Return the
    problem, or ""."""
    problem = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((reach.address, reach.port), timeout=min(left, ONE_SECONDS)) as end:
                end.sendall(name + b"\n")
                if _line(end) == name:
                    return ""
                problem = "another server answers there"
        except TimeoutError:
            problem = problem or "timed out"  # the last attempt may be too short, and hide what the others found
        except OSError as error:
            problem = str(error.strerror or error)
        time.sleep(AGAIN_SECONDS)
    problem = problem or "the time limit was reached before the first attempt"
    return f"cannot reach {reach.address}:{reach.port}: {problem}"


def _line(end: socket.socket) -> bytes:
    """Receive up to a newline, or 1024 bytes, which no machine name has."""
    found = b""
    while not found.endswith(b"\n") and len(found) < 1024:
        piece = end.recv(1024)
        if not piece:
            break
        found += piece
    return found.removesuffix(b"\n")


if __name__ == "__main__":
    main(Reach(**json.loads(sys.argv[1])))
