"""Programs that check the network on every machine of a job, and their reports to the launcher, of one line of JSON:
python -m asyncrl.extensions.reach.programs NAME PARAMETERS.

Reach: the first machine listens and echoes what it receives; every other one connects and compares. Only machine names
are sent, nothing else of the run. AllReduce: a sum over all trainer machines, with the backend that the ranks will use.

waits for     the other machines, which start at about the same time: to connect; to meet, and for the sum
deadline      `seconds` for all of it, once torch is imported

They always exit with 0: on any other exit code a cluster may kill the tasks that have not reported yet.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from asyncrl.network import stores
from asyncrl.network.addresses import node_name

MARK = "asyncrl-preflight "
"""Prefix of the line, because modules and prologs print as well."""
SAID = 300
"""Maximum number of characters quoted from other output."""
AGAIN_SECONDS = 0.1
ONE_SECONDS = 5.0
"""Timeout of one connection."""
GRACE_SECONDS = 5.0
NUMBERS = 1 << 20
"""Number of float32 elements in the sum: 4 MiB."""


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


class NodeProgram:
    """Parameters of a program, identical on every machine; a dataclass."""

    def argv(self) -> list[str]:
        """Return the arguments of Python that run it."""
        parameters: Any = self
        return ["-m", __name__, type(self).__name__, json.dumps(asdict(parameters))]

    def run(self) -> None:
        """Run the check on this machine, and report the result."""
        raise NotImplementedError


@dataclass(frozen=True)
class Reach(NodeProgram):
    """Check that this machine reaches the first one, and sees its folders."""

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

    def run(self) -> None:
        """Run the check on this machine, and report the result."""
        me, began = node_name(), time.monotonic()
        unseen = [folder for folder, file in self.folders.items() if not _sees(Path(file))]
        unseen += [folder for folder, size in self.models.items() if _size(Path(folder, "config.json")) != size]
        answer: dict[str, Any] = {"node": me, "unseen": unseen}
        late = f"the check did not finish within {self.seconds:.0f} s"
        end_after(self.seconds + GRACE_SECONDS, {**answer, "problem": late})
        try:
            if me == self.listener:
                problem = _listen(self, began + self.seconds)
            else:
                problem = _connect(self, me.encode(), began + self.seconds)
        except OSError as error:
            problem = f"{self.address}:{self.port}: {error.strerror or error}"
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


@dataclass(frozen=True)
class AllReduce(NodeProgram):
    """Check that the trainer machines can sum numbers."""

    backend: str
    """gloo or nccl."""
    names: Sequence[str]
    """Names of the machines; the first is rank 0."""
    address: str
    """Address of the first machine."""
    port: int
    interfaces: Mapping[str, str]
    """Network interface by machine; empty: collectives find it themselves."""
    seconds: float

    def run(self) -> None:
        """Run the check on this machine, and report the result."""
        from asyncrl.launch.plan import INTERFACES  # imports the configuration, which Reach does without

        me = node_name()
        if name := self.interfaces.get(me):
            os.environ.update(dict.fromkeys(INTERFACES, name))
        try:
            answer: dict[str, Any] = {"problem": "", "seconds": _sum(self, me)}
        except (RuntimeError, ValueError, OSError) as error:  # torch's own errors are RuntimeErrors
            answer = {"problem": str(error).strip().partition("\n")[0]}
        emit({"node": me, **answer})
        os._exit(0)  # the process group of a failed collective may never shut down


def _sum(program: AllReduce, me: str) -> float:
    """Return the seconds of the second sum; the first also sets up the connections. Raises ValueError for a wrong
    sum."""
    import torch  # imported before the deadline starts: on a slow file system it may take long
    import torch.distributed as dist

    end_after(
        program.seconds + GRACE_SECONDS, {"node": me, "problem": f"it did not finish within {program.seconds:.0f} s"}
    )
    rank = program.names.index(me)
    left = timedelta(seconds=program.seconds)
    stores.bind()
    dist.init_process_group(
        program.backend,
        init_method=f"tcp://{program.address}:{program.port}",
        rank=rank,
        world_size=len(program.names),
        timeout=left,
    )
    device = torch.device("cuda", 0) if program.backend == "nccl" else torch.device("cpu")
    seconds = 0.0
    for _ in range(2):
        numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
        began = time.monotonic()
        dist.all_reduce(numbers)
        found, right = (
            float(numbers[0]),
            sum(range(1, len(program.names) + 1)),
        )  # reading the value waits for the device
        seconds = time.monotonic() - began
        if found != right:
            raise ValueError(f"the sum is {found} instead of {right}")
    return seconds


if __name__ == "__main__":
    kind: type[Reach] | type[AllReduce] = {"Reach": Reach, "AllReduce": AllReduce}[sys.argv[1]]
    kind(**json.loads(sys.argv[2])).run()
