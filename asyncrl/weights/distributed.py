"""Transport to any host: a process group of one trainer rank and every engine rank, and one broadcast per bucket."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from asyncrl.engine.calls import Answer, CallRefused, Calls
from asyncrl.engine.fleet import PROBE_SECONDS, Fleet
from asyncrl.errors import AsyncRLError, EngineError
from asyncrl.network.ports import free_port
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.transport import Transport

ATTEMPTS = 3
LEAVE_SECONDS = 30.0
"""Seconds without an answer after which engines of a broken group count as hanging; timeout of leaving a group."""


class DistributedTransport(Transport):
    """SGLang's update_weights_from_distributed with load_format flattened_bucket.

    A new group is created whenever the fleet has changed or a broadcast broke: all leave the broken group, receivers
    that died or hang are lost, and the others get this bucket again. Over NCCL, where a death is known from the
    engines' answers alone, this was not run.

    An engine receives one broadcast at a time, and blocks until it is complete. If two stages broadcast at once, one
    engine could wait for the first and another for the second, and neither broadcast would end.
    """

    turns = True

    def __init__(self, fleet: Fleet, ranks: int, *, host: str, stage: int, backend: str) -> None:
        self._fleet = fleet
        self._ranks = ranks
        self._host = host
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._name = f"asyncrl-stage{stage}"  # that of a trainer that died, too, whose group the engines still hold
        self._members: tuple[str, ...] = ()
        self._made_at = -1  # the fleet's change counter when the group was created
        self._work: dist.Work | None = None

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Broadcast one bucket. Raises EngineError if live engines cannot be reached by a broadcast."""
        body = {
            "names": [entry.name for entry in bucket],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket],
            "shapes": [list(entry.shape) for entry in bucket],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": self._fleet.selector,
            "group_name": self._name,
        }
        problem = ""
        for attempt in range(ATTEMPTS):
            if not self._fleet.urls:
                return  # all are dead and will be restarted
            problem = self._attempt(flat, body, last=attempt == ATTEMPTS - 1)
            if not problem:
                return
            self._leave(broken=True)
            lose_the_dead(self._fleet)
        raise EngineError(f"{ATTEMPTS} broadcasts of a bucket failed although the engines are alive: {problem}")

    def _attempt(self, flat: Tensor, body: Answer, *, last: bool) -> str:
        """Broadcast once. Return why an engine may not have the bucket, or ""."""
        try:
            self._connect()
        except EngineError as error:
            return str(error)
        receiving = self._fleet.start("/update_weights_from_distributed", dict.fromkeys(self._members, body))
        broken = self._broadcast(flat)
        problems = self._received(receiving, broken)
        if last and not broken:
            for url, problem in problems.items():  # an engine that still fails has an error of its own
                self._fleet.lose(url, str(problem))
        elif broken or problems:
            return broken or "; ".join(str(found) for found in problems.values())
        if self._work is not None:
            self._work.wait()
            self._work = None
        return ""

    def _received(self, receiving: Calls, broken: str) -> dict[str, AsyncRLError]:
        """Wait until the engines have the bucket, and return the errors by engine. When the group is broken, the others
        have little time: gloo does not wake a receiver whose sender left in the middle. One that could not receive
        leaves the group at once, because those to which it passes on what it receives would wait for it."""
        problems: dict[str, AsyncRLError] = {}
        leaving: Calls = {}
        while receiving:
            patience = LEAVE_SECONDS if broken or problems else None
            answered = wait(receiving.values(), patience, FIRST_COMPLETED).done
            if not answered:
                problems |= {url: EngineError(f"{url} hangs in a broken group") for url in receiving}
                break
            _, failed = self._fleet.settle({url: call for url, call in receiving.items() if call in answered})
            receiving = {url: call for url, call in receiving.items() if call not in answered}
            problems |= failed
            refused = [url for url, problem in failed.items() if isinstance(problem, CallRefused)]
            leaving |= self._fleet.begin(self._forget, refused)
        self._fleet.settle(leaving)
        return problems

    def _forget(self, url: str) -> Answer:
        return self._fleet.post(url, "/destroy_weights_update_group", {"group_name": self._name}, LEAVE_SECONDS)

    def _broadcast(self, flat: Tensor) -> str:
        """Broadcast, and return why it broke, or "". A broken group is left at once, because it would block the
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
            self._leave(broken=True)
            return f"broadcast over {self._backend}: {error}"
        return ""

    def _connect(self) -> None:
        """Join a group with the engines. Rank 0 is this process, and the others are those of each engine in turn. All
        join at once."""
        members = self._fleet.urls
        if self._group and self._members == members and self._made_at == self._fleet.changes:
            return
        self._leave()
        self._fleet.settle(self._fleet.begin(self._forget, members))
        world = 1 + len(members) * self._ranks
        port = free_port(self._host)
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

    def _leave(self, *, broken: bool = False) -> None:
        """Leave the group. Where it is broken, what it still does is aborted."""
        group, self._group, self._work = self._group, None, None
        if group is not None:
            with suppress(RuntimeError):
                (c10d._abort_process_group if broken else dist.destroy_process_group)(group)


def group_beside_the_default(
    backend: str, url: str, world: int, name: str, timeout: float, *, rank: int = 0
) -> dist.ProcessGroup:
    """Create a process group that other programs may join (like SGLang's init_custom_process_group, from the same
    functions). Another rank than 0 is a receiver of scripts/bench_weights.py.

    torch's new_group only splits the default group; this one has its own store and world. Raises EngineError if the
    others do not join within `timeout` seconds.
    """
    from torch.distributed.rendezvous import rendezvous

    wait = timedelta(seconds=timeout)
    try:
        store, rank, world = next(rendezvous(url, rank, world, timeout=wait))
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


def lose_the_dead(fleet: Fleet) -> None:
    """Probe every engine's scheduler, and lose those that do not answer in time: the first one alone at first, because
    others may wait for it in a broadcast, and answer when it is killed."""
    for most in (1, 1, 1, None):
        _, problems = fleet.settle(fleet.begin(lambda url: fleet.get(url, "/server_info", PROBE_SECONDS), fleet.urls))
        if not problems:
            return
        for url, problem in list(problems.items())[:most]:
            fleet.lose(url, str(problem))
