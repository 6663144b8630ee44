"""Transport to any host: a process group of one trainer rank and every engine rank, and one broadcast per bucket."""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from asyncrl.engine.fleet import CallRefused, Fleet
from asyncrl.errors import EngineError
from asyncrl.network.ports import free_port
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.transport import Transport

ATTEMPTS = 3


class DistributedTransport(Transport):
    """SGLang's update_weights_from_distributed with load_format flattened_bucket.

    A new group is created whenever the fleet has changed. If a gloo broadcast breaks, no receiver gets the bucket:
    receivers that died are lost, and the others get this bucket again in a new group. NCCL does not report that a
    receiver died: the trainer's collective times out, and the run ends.

    An engine receives one broadcast at a time, and blocks until it is complete. If two stages broadcast at once, one
    engine could wait for the first and another for the second, and neither broadcast would end.
    """

    turns = True

    def __init__(self, fleet: Fleet, ranks: int, *, host: str, stage: int, backend: str) -> None:
        self._fleet = fleet
        self._ranks = ranks
        self._host = host
        self._stage = stage
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._members: tuple[str, ...] = ()
        self._made_at = -1  # the fleet's change counter when the group was created
        self._work: dist.Work | None = None

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Broadcast one bucket. Raises EngineError if live engines cannot be reached by a broadcast."""
        self._send(flat, bucket)
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _send(self, flat: Tensor, bucket: Bucket) -> None:
        body = {
            "names": [entry.name for entry in bucket],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket],
            "shapes": [list(entry.shape) for entry in bucket],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": self._fleet.selector,
        }
        if not self._fleet.urls:
            return  # all are dead and will be restarted
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                self._connect()
            except EngineError as error:
                problem = str(error)
            else:
                named = {**body, "group_name": self._name}
                receiving = self._fleet.start("/update_weights_from_distributed", dict.fromkeys(self._members, named))
                broken = self._broadcast(flat)
                if attempt == ATTEMPTS - 1 and not broken:
                    self._fleet.finish(receiving)  # an engine that still fails has an error of its own
                    return
                _, problems = self._fleet.settle(receiving)
                if not problems and not broken:
                    return
                problem = broken or "; ".join(str(found) for found in problems.values())
            self._disconnect()
            self._fleet.lose_the_dead()
        raise EngineError(f"{ATTEMPTS} broadcasts of a bucket failed although the engines are alive: {problem}")

    def _broadcast(self, flat: Tensor) -> str:
        """Broadcast, and return why it broke, or "". A broken group is left at once, because it would block the other
        receivers.

        Over NCCL the stream waits only after the engines have answered. Trainers have one queue for all streams
        (CUDA_DEVICE_MAX_CONNECTIONS=1), in which a stream that waits would hold up the copies into the next bucket.
        """
        try:
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            if self._backend == "nccl":
                self._work = work
            else:
                work.wait()
        except RuntimeError as error:
            self._leave()
            return f"broadcast over {self._backend}: {error}"
        return ""

    def _connect(self) -> None:
        """Join a group with the engines. Rank 0 is this process, and the others are those of each engine in turn. All
        join at once."""
        members = self._fleet.urls
        if self._members == members and self._made_at == self._fleet.changes:
            return
        self._disconnect()
        world = 1 + len(members) * self._ranks
        port = free_port(self._host)
        self._name = f"asyncrl-stage{self._stage}-{secrets.token_hex(4)}"
        joining = self._fleet.start(
            "/init_weights_update_group",
            {
                url: {
                    "master_address": self._host,
                    "master_port": port,
                    "rank_offset": 1 + i * self._ranks,
                    "world_size": world,
                    "group_name": self._name,
                    "backend": self._backend,
                }
                for i, url in enumerate(members)
            },
        )
        try:
            self._group = group_beside_the_default(
                self._backend, f"tcp://{self._host}:{port}", world, self._name, self._fleet.timeout
            )
        except EngineError:
            _, problems = self._fleet.settle(joining)
            for url, problem in problems.items():
                if isinstance(problem, CallRefused):
                    self._fleet.lose(url, str(problem))
            raise
        self._fleet.finish(joining)
        self._members = members
        self._made_at = self._fleet.changes

    def _disconnect(self) -> None:
        """Leave the group, and let the live engines destroy it."""
        self._leave()
        if self._members:
            forgetting = {url: {"group_name": self._name} for url in self._members if url in self._fleet.urls}
            self._fleet.settle(self._fleet.start("/destroy_weights_update_group", forgetting))
            self._members = ()

    def _leave(self) -> None:
        if self._group is not None:
            with suppress(RuntimeError):  # already broken
                dist.destroy_process_group(self._group)
            self._group = None


def group_beside_the_default(backend: str, url: str, world: int, name: str, timeout: float) -> dist.ProcessGroup:
    """Create a process group that other programs may join, of which this one is rank 0 (like SGLang's
    init_custom_process_group, from the same functions).

    torch's new_group only splits the default group; this one has its own store and world. Raises EngineError if the
    others do not join within `timeout` seconds.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    wait = timedelta(seconds=timeout)
    try:
        store, rank, world = next(rendezvous(url, 0, world, timeout=wait))
        store.set_timeout(wait)
        group, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            backend_options=None,
            timeout=wait,
        )
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(f"the engines did not join the group {name} within {timeout} s: {error}") from None
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
