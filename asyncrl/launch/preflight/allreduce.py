"""A sum over all trainers' machines, by what their ranks will use: python -m asyncrl.launch.preflight.allreduce JSON.

waits for     the other machines: the meeting, then the sum
deadline      `seconds` for all of it, once torch is there
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

from asyncrl import stores
from asyncrl.launch.plan import INTERFACES
from asyncrl.launch.preflight.telling import end_after, tell
from asyncrl.launch.slurm.task import node

NUMBERS = 1 << 20
"""Of the sum, in float32: 4 MiB."""
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class AllReduce:
    """What every machine is told, in the same words."""

    backend: str
    """gloo or nccl."""
    names: Sequence[str]
    """The machines; the first one's is rank 0."""
    address: str
    """Of the first."""
    port: int
    interfaces: Mapping[str, str]
    """By machine; empty: collectives find it themselves."""
    seconds: float

    def argv(self) -> list[str]:
        """Of the program, after Python."""
        return ["-m", __name__, json.dumps(asdict(self))]


def main(told: AllReduce) -> None:
    """Whatever it finds it ends well: at an exit code srun would kill those that have not told yet."""
    me = node()
    if name := told.interfaces.get(me):
        os.environ.update(dict.fromkeys(INTERFACES, name))
    try:
        answer: dict[str, Any] = {"problem": "", "seconds": _sum(told, me)}
    except (RuntimeError, ValueError, OSError) as error:  # torch's own are RuntimeErrors
        answer = {"problem": str(error).strip().partition("\n")[0]}
    tell({"node": me, **answer})
    os._exit(0)  # a group that failed may never be taken down


def _sum(told: AllReduce, me: str) -> float:
    """Seconds of the second sum: the first also makes the connections."""
    import torch  # before the deadline begins: from a slow file system it may take long
    import torch.distributed as dist

    end_after(told.seconds + GRACE_SECONDS, {"node": me, "problem": f"no end after {told.seconds:.0f} s"})
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
        found, right = float(numbers[0]), sum(range(1, len(told.names) + 1))  # reading it waits for the device
        seconds = time.monotonic() - began
        if found != right:
            raise ValueError(f"the sum is {found}, not {right}")
    return seconds


if __name__ == "__main__":
    main(AllReduce(**json.loads(sys.argv[1])))
