"""An all-reduce over all trainer machines, with the backend that the ranks will use: python -m
asyncrl.launch.preflight.allreduce JSON.

waits for     the other machines: rendezvous, then the sum
deadline      `seconds` for all of it, once torch is imported
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from asyncrl.launch.plan import INTERFACES
from asyncrl.launch.preflight.node_report import emit, end_after, node_name
from asyncrl.network import stores

NUMBERS = 1 << 20
"""Number of float32 elements in the sum: 4 MiB."""
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class AllReduce:
    """Parameters of the check, identical on every machine."""

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

    def argv(self) -> list[str]:
        """Return the arguments of the program, after Python."""
        return ["-m", __name__, json.dumps(asdict(self))]


def main(told: AllReduce) -> None:
    """Run the check and report the result. Always exits with 0: on any other exit code a cluster may kill
    the tasks that have not reported yet."""
    me = node_name()
    if name := told.interfaces.get(me):
        os.environ.update(dict.fromkeys(INTERFACES, name))
    try:
        answer: dict[str, Any] = {"problem": "", "seconds": _sum(told, me)}
    except (RuntimeError, ValueError, OSError) as error:  # torch's own errors are RuntimeErrors
        answer = {"problem": str(error).strip().partition("\n")[0]}
    emit({"node": me, **answer})
    os._exit(0)  # the process group of a failed collective may never shut down


def _sum(told: AllReduce, me: str) -> float:
    """Return the seconds of the second sum; the first also sets up the connections. Raises ValueError for a wrong
    sum."""
    import torch  # imported before the deadline starts: on a slow file system it may take long
    import torch.distributed as dist

    end_after(told.seconds + GRACE_SECONDS, {"node": me, "problem": f"it did not finish within {told.seconds:.0f} s"})
    rank = told.names.index(me)
    left = timedelta(seconds=told.seconds)
    stores.bind()
    dist.init_process_group(
        told.backend,
        init_method=f"tcp://{told.address}:{told.port}",
        rank=rank,
        world_size=len(told.names),
        timeout=left,
    )
    device = torch.device("cuda", 0) if told.backend == "nccl" else torch.device("cpu")
    seconds = 0.0
    for _ in range(2):
        numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
        began = time.monotonic()
        dist.all_reduce(numbers)
        found, right = float(numbers[0]), sum(range(1, len(told.names) + 1))  # reading the value waits for the device
        seconds = time.monotonic() - began
        if found != right:
            raise ValueError(f"the sum is {found} instead of {right}")
    return seconds


if __name__ == "__main__":
    main(AllReduce(**json.loads(sys.argv[1])))
