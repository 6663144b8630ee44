"""Placement of a run's processes on its machines. Pure.

Trainer ranks fill the first machines in blocks, so that tensor-parallel neighbours share a machine. Engines take the
remaining GPUs in order; an engine whose ranks do not fit on one machine takes several whole ones. Router and rollout
process run on the first machine, which may be one without GPUs. On machines without GPUs, trainers get the first half,
and engines are assigned to the others round-robin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from asyncrl import lookup
from asyncrl.config import AuxiliaryModelConfig, ClusterConfig, Config, EngineConfig, TrainerConfig, on_gpu
from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """A machine of the run."""

    name: str  # its name in the cluster; empty if the run has only one machine
    address: str  # address that its servers bind to and others connect to
    gpus: tuple[str, ...]  # as in CUDA_VISIBLE_DEVICES
    ports: tuple[int, ...]  # ports that were free when the machine was probed
    interface: str = ""  # network interface of the address; empty: collectives find it themselves
    block: int = 0  # first of REPLICA_PORTS consecutive free ports, if engines have replicas; 0: there is none


@dataclass(frozen=True)
class Seat:
    """The machine, GPUs and ports assigned to one process."""

    node: Node
    gpus: tuple[int, ...] = ()  # indices of its GPUs among those of the node
    port: int = 0
    meeting: int = 0  # rendezvous port of its ranks; for the router, its metrics port
    scheme: str = "http"  # https if servers authenticate as the run's (tls.py)

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"{self.scheme}://{self.node.address}:{self.port}"

    @property
    def visible(self) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES."""
        return ",".join(self.node.gpus[place] for place in self.gpus)


@dataclass(frozen=True)
class Placement:
    """The seats of all processes of a run."""

    router: Seat
    rollout: Seat
    trainers: list[Seat]  # by rank; `gpus` are those of all ranks on the node
    engines: list[list[Seat]]  # per engine, one seat for each machine that it spans; the first one's server answers
    frozen: dict[str, list[Seat]] = field(default_factory=dict)  # engines of models that are not trained, by role
    hosts: list[Seat] = field(default_factory=list)  # a seat without ports on each machine of rollouts and engines
    ports: dict[str, list[Seat]] = field(default_factory=dict)  # of extensions, on the rollout process's machine

    @property
    def fleets(self) -> dict[str, list[Seat]]:
        """Return the seats of all engines, by the name of their section; several of an engine on several machines."""
        return {"engine": [seat for seats in self.engines for seat in seats], **self.frozen}

    def urls(self) -> dict[str, Any]:
        """Return the URLs of the servers, as fields of Addresses."""
        return {
            "engines": tuple(seats[0].url for seats in self.engines),
            "router": self.router.url,
            "rollout": self.rollout.url,
            "frozen": {role: tuple(seat.url for seat in seats) for role, seats in self.frozen.items()},
        }

    def listening(self) -> list[str]:
        """Return the URLs of all seats with a listening process, including those of an engine's further ranks."""
        return [seat.url for seat in (self.router, self.rollout, *chain(*self.fleets.values()))]

    def local_rank(self, rank: int) -> int:
        """Return the local rank of a trainer rank: its index among the ranks of its node."""
        mine = self.trainers[rank].node
        return sum(seat.node == mine for seat in self.trainers[:rank])


class Room:
    """The unassigned GPUs and ports of a node."""

    def __init__(self, node: Node, cluster: ClusterConfig) -> None:
        self.node = node
        self._scheme = "https" if cluster.tls else "http"
        self.free = list(range(len(node.gpus)))
        self._ports: Iterator[int] = iter(node.ports)

    def seat(self, gpus: int = 0, ports: int = 0) -> Seat:
        """Assign so many GPUs and ports."""
        taken = tuple(self.free[:gpus])
        self.free = self.free[gpus:]
        port = next(self._ports) if ports > 0 else 0
        meeting = next(self._ports) if ports > 1 else 0
        return Seat(self.node, taken, port, meeting, self._scheme)

    def again(self, gpus: Sequence[int]) -> Room:
        """Return this node with these GPUs, to be assigned a second time."""
        room = copy(self)
        room.free = list(gpus)
        return room


def ports_wanted(config: Config) -> int:
    """Return the number of free ports that suffices for a node, whatever is placed on it."""
    servers = sum(section.started for section in config.fleets.values())
    return 2 * servers + 4 + sum(one.launch().ports() for one in lookup.active(config).values())


def place(config: Config, nodes: Sequence[Node]) -> Placement:
    """Assign every process of the run to a machine. Raises ConfigError if there are too few machines."""
    rooms = [Room(node, config.cluster) for node in nodes]
    working = rooms[config.cluster.cpu_nodes :]
    if not working:
        rollouts = config.cluster.cpu_nodes
        remedy = (
            f"cluster.cpu_nodes={rollouts} reserves all machines for rollouts; other processes need at least one more."
        )
        raise ConfigError("cluster.nodes", len(nodes), remedy)
    each = len(working[0].node.gpus)
    head = rooms[0]
    router, rollout = head.seat(ports=2), head.seat(ports=1)
    trainers = _trainers(config, working, each) if config.trains else []
    used = len({seat.node.name for seat in trainers})
    others = working[used:] or working
    if not config.generates:
        return Placement(router, rollout, trainers, [])
    fleets: dict[str, list[list[Seat]]] = {}
    for name, section in config.fleets.items():
        rooms_for = others if config.cluster.trainer_nodes or not uses_gpus(name, section, each) else working
        if name == "engine" and config.cluster.shares_gpus:
            rooms_for = _shared(config, trainers, working[:used])
        fleets[name] = place_fleet(name, section, section.started, rooms_for, each)
    frozen = {role: [seats[0] for seats in fleets[role]] for role in config.frozen}
    hosts = [room.seat() for room in {id(room): room for room in (head, *others)}.values()]
    ports = {
        name: [head.seat(ports=1) for _ in range(one.launch().ports())] for name, one in lookup.active(config).items()
    }
    return Placement(router, rollout, trainers, fleets["engine"], frozen, hosts, ports)


def _shared(config: Config, trainers: list[Seat], rooms: list[Room]) -> list[Room]:
    """Return the trainers' machines with the trainers' GPUs, for engines that use them, too."""
    gpus = {seat.node.name: seat.gpus for seat in trainers}
    rooms = [room.again(gpus[room.node.name]) for room in rooms]
    count, ranks = config.engine.started, config.engine.ranks
    if (shared := sum(len(room.free) for room in rooms)) and shared != count * ranks:
        raise ConfigError(
            _sizes("engine", config.engine),
            f"{count} × {ranks}",
            f"With cluster.placement={config.cluster.placement} the engines use the {shared} GPUs of the trainers: the "
            "product must be that number.",
        )
    return rooms


def place_fleet(
    name: str, section: EngineConfig | AuxiliaryModelConfig, count: int, rooms: list[Room], each: int
) -> list[list[Seat]]:
    """Place the engines of a section on machines with `each` GPUs. Raises ConfigError if they do not fit."""
    if uses_gpus(name, section, each):
        return [_on_gpus(name, section, rooms, each) for _ in range(count)]
    return [[rooms[number % len(rooms)].seat(ports=2)] for number in range(count)]


def uses_gpus(name: str, section: TrainerConfig | EngineConfig | AuxiliaryModelConfig, each: int) -> bool:
    """Return whether the processes of a section use GPUs, of which each machine has `each`. Raises ConfigError."""
    if section.device == "cuda" and not each:
        raise ConfigError(f"{name}.device", "cuda", "The machines have no visible GPU: use cpu or auto.")
    return on_gpu(section, each)


def _trainers(config: Config, rooms: list[Room], each: int) -> list[Seat]:
    world, wanted = config.trainer.world_size, config.cluster.trainer_nodes
    gpu = uses_gpus("trainer", config.trainer, each)
    if gpu:
        count = wanted or -(-world // each)
    else:
        most = len(rooms) if not config.generates else max(1, len(rooms) // 2)
        count = wanted or max(number for number in range(1, most + 1) if world % number == 0)
    if count > len(rooms) or world % count or (gpu and world // count > each):
        raise ConfigError(
            "cluster.trainer_nodes" if wanted else "cluster.nodes",
            wanted or len(rooms),
            f"{world} trainer ranks must be divided evenly among machines of the job"
            + (f" with {each} GPUs each" if gpu else "")
            + ": change this number, or trainer.*_parallel.",
        )
    seats: list[Seat] = []
    for room in rooms[:count]:
        seat = room.seat(gpus=world // count if gpu else 0, ports=1 if not seats else 0)
        seats += [seat] * (world // count)
    return seats


def _on_gpus(name: str, section: EngineConfig | AuxiliaryModelConfig, rooms: list[Room], each: int) -> list[Seat]:
    ranks = section.ranks
    for room in rooms:
        if len(room.free) >= ranks:
            return [room.seat(gpus=ranks, ports=2)]
    whole = [room for room in rooms if len(room.free) == each]
    if name == "engine" and ranks > each and ranks % each == 0 and len(whole) >= ranks // each:
        first, *more = whole[: ranks // each]
        head = first.seat(gpus=each, ports=2)
        head = replace(head, meeting=first.node.block or head.meeting)
        return [head, *(room.seat(gpus=each, ports=1) for room in more)]
    free = sum(len(room.free) for room in rooms)
    raise ConfigError(
        _sizes(name, section),
        f"{section.started} × {ranks}",
        f"No machine has {ranks} free GPUs ({free} are free in total): lower it, use more machines "
        "(cluster.nodes) or GPUs (cluster.gpus), or change the number of trainer ranks.",
    )


def _sizes(name: str, section: EngineConfig | AuxiliaryModelConfig) -> str:
    """Return the settings whose product is the number of GPUs of a fleet."""
    stages = f" × {name}.pipeline_parallel" if section.ranks > section.tensor_parallel else ""
    return f"{name}.count × {name}.tensor_parallel{stages}"


def imagined(config: Config, count: int, each: int) -> list[Node]:
    """Return placeholders for the machines of a job that has not started."""
    ports = tuple(range(1, 1 + ports_wanted(config)))
    gpus = tuple(str(number) for number in range(each))
    cpu_nodes = config.cluster.cpu_nodes
    return [
        Node(f"node{number}", f"node{number}", gpus if number >= cpu_nodes else (), ports) for number in range(count)
    ]
