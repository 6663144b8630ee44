"""`asyncrl-engines`: add engines to a running run, remove them, or list them.

    asyncrl-engines add RUN               start as many engines as fit the GPUs of this machine, or of the job in
                                          which the command runs; it ends with the run or on a signal
    asyncrl-engines add RUN --count 2     start two engines
    asyncrl-engines remove RUN URL ...    remove engines, whoever started them, and wait until they have left
    asyncrl-engines list RUN              print all engines and their state

RUN is the run's folder, on a file system that all of its machines share (docs/rollouts.md).

waits for     the lease of the run (leases.py); after a signal, the trainer, which releases the engines
deadline      LEASE_SECONDS; LEAVE_SECONDS (launch/restarts.py)
on death      an engine that dies is restarted, like the run's own engines; if this command dies, its engines die with
              it, and the run continues with the others
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from asyncrl.config import Config, on_gpu, read
from asyncrl.engine.registry import Registry
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, Stopped, visible
from asyncrl.launch.checks.machines import check_gpu_kinds
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Node, Room, Seat, place_fleet, uses_gpus
from asyncrl.launch.plan import engines
from asyncrl.launch.processes import Supervisor
from asyncrl.launch.restarts import LEAVE_SECONDS, restart_policy
from asyncrl.leases import RENEW_SECONDS
from asyncrl.lookup import offered
from asyncrl.network.addresses import FILE, Addresses
from asyncrl.network.tls import Authority
from asyncrl.user_code import load
from asyncrl.weights.choice import LOOPBACK, choose

PORTS = 32
"""Minimum number of ports to reserve on a machine; each engine takes two."""
TOLD_SECONDS = 5.0


class RunEnded(Exception):
    """The run to which the engines belong has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 if something failed, 2 for wrong arguments, 128 + n if signal n stopped it."""
    asked = _parser().parse_args(argv)
    os.umask(0o077)
    try:
        run = _Run(asked.run)
        if asked.command == "add":
            add(run, asked.count, asked.gpus, asked.host)
        elif asked.command == "remove":
            remove(run, asked.urls)
        else:
            print("\n".join(listed(run)))
    except ConfigError as error:
        return _told(2, error)
    except AsyncRLError as error:
        return _told(1, error)
    except Stopped as stopped:
        return _told(128 + stopped.number, f"stopped by {stopped} before the run had released the engines")
    except KeyboardInterrupt:  # while none of our processes runs
        return _told(128 + signal.SIGINT, "stopped by SIGINT")
    return 0


class _Run:
    """A run in progress."""

    def __init__(self, folder: Path) -> None:
        """Open the run. Raises ConfigError if there is none."""
        self.folder = folder.expanduser().absolute()
        if not (self.folder / FILE).is_file():
            raise ConfigError("RUN", str(folder), f"It holds no {FILE}: name the folder of a running run.")
        self.config, self.addresses = read(self.folder), Addresses.read(self.folder)
        self.registry = Registry(self.folder)
        lease = self.lease()
        if lease is None:
            raise ConfigError("RUN", str(folder), "No run is active in this folder: start it first.")
        self.launcher, self.job = str(lease["host"]), str(lease["job"])
        if self.config.mode != "train":
            remedy = "Engines can only join a run that trains."
            raise ConfigError("mode", self.config.mode, remedy)
        if self.config.cluster.shares_gpus:
            remedy = "The engines of this run share the GPUs of its trainers: no others can join, and none can leave."
            raise ConfigError("cluster.placement", self.config.cluster.placement, remedy)

    def lease(self) -> dict[str, object] | None:
        """Return the launcher's lease; None if the launcher has ended, or the run was restarted with other keys."""
        told = self.registry.run()
        return told if told and told["run_id"] == self.addresses.run_id else None


# -- add -------------------------------------------------------------------------------------------------------


def place_engines(config: Config, nodes: Sequence[Node], count: int | None) -> list[list[Seat]]:
    """Place additional engines on machines of their own. Without `count`, place as many as fit the GPUs, or one per
    machine without GPUs. Raises ConfigError if there are too few machines."""
    each, rooms = len(nodes[0].gpus), [Room(node, config.cluster) for node in nodes]
    if count is None:
        gpu, ranks = uses_gpus("engine", config.engine, each), config.engine.ranks
        of_one = each // ranks if each >= ranks else 0
        count = max(1, len(nodes) * of_one or len(nodes) * each // ranks) if gpu else len(nodes)
    return place_fleet("engine", config.engine, count, rooms, each)


def add(run: _Run, count: int | None, gpus: int | None, host: str | None) -> None:
    """Start engines, and supervise them until the run ends or they have left."""
    if count is not None and count < 1:
        raise ConfigError("--count", count, "Must be 1 or more; if unset, as many as fit the GPUs.")
    word, ports = secrets.token_hex(4), max(PORTS, 2 * (count or 0))
    settings = {"nodes": None, "gpus": gpus, "host": host or run.config.cluster.host}
    config = run.config.model_copy(update={"cluster": run.config.cluster.model_copy(update=settings)})
    cluster = surrounding(config)
    cluster.probe(config, ports)
    for node in cluster.nodes:
        check_reach(run, node)
    seats = place_engines(config, cluster.nodes, count)
    check_gpu_kinds(config, [seat for one in seats for seat in one], cluster.nodes, cluster.machines)
    if config.cluster.tls:
        Authority(run.folder).sign(seat.url for one in seats for seat in one)
    mine = replace(run.addresses, run_id=f"{word}-{run.addresses.run_id}")  # cleanup must spare the run's own processes
    specs = engines(config, mine, seats, run.folder, label=f"{word}-", seed=int(word[:6], 16))
    places = {one[0].url: one[0].node.name or socket.gethostname() for one in seats}
    keeper = EngineKeeper(run, places)
    ours = [] if cluster.job == run.job else cluster.cancellation()  # it may be the run's own job
    lease = run.registry.file_of(keeper.urls[0])
    specs = cluster.steps(specs, run.folder, mine.run_id, [run.folder, mine.model], lease, ours)
    policy = restart_policy(run.folder, mine, specs, cluster.has, f"{word}-")
    _say(
        f"{len(seats)} engine(s) for {run.folder}: {', '.join(keeper.urls)}; logs: logs/engine-{word}-*.log in "
        "that folder"
    )
    supervisor = Supervisor(specs, run.folder, mine.run_id, config.cluster.stop_grace, policy, keeper.asked_to_stop)
    try:
        supervisor.run(keeper.each_poll)
    except RunEnded:
        _say("the run has ended")
    finally:
        keeper.end()
        cluster.end_steps(mine.run_id)


class EngineKeeper:
    """Maintains the leases of the engines started here, and watches the lease of the run."""

    def __init__(self, run: _Run, engines: Mapping[str, str]) -> None:
        """Register the engines and their leases. `engines` maps the URL of each to its machine."""
        self.urls, self._run, self._stopping = list(engines), run, False
        for url in engines:
            run.registry.starts(url)
        self._leases = [run.registry.lease_of(url, host=host) for url, host in engines.items()]
        self._looked_at = time.monotonic()

    def each_poll(self) -> None:
        """Renew the leases. Raises RunEnded when the run's lease has ended."""
        for lease in self._leases:
            lease.renew()
        if time.monotonic() - self._looked_at > RENEW_SECONDS:
            self._looked_at = time.monotonic()
            if self._run.lease() is None:
                raise RunEnded

    def asked_to_stop(self, number: int) -> None:
        """Handle a signal: ask the run to release the engines. Raises Stopped at the second signal."""
        if self._stopping:
            raise Stopped(number)
        self._stopping = True
        _say(
            f"{signal.Signals(number).name}: waiting for the run to release the engines; repeat the signal to "
            "stop them at once"
        )
        for url in self.urls:
            self._run.registry.ask_to_leave(url)

    def end(self) -> None:
        """End the leases and deregister the engines, once they have stopped."""
        for lease in self._leases:
            lease.end()
        for url in self.urls:
            self._run.registry.stopped(url)


def surrounding(config: Config) -> Cluster:
    """Return the machines of the job that this process runs in, whatever the launcher of the run; outside of a job this
    machine."""
    kinds: list[type[Cluster]] = [load(path, "extensions") for path in offered("clusters", config.extensions).values()]
    return next((kind for kind in kinds if kind.surrounds()), Cluster)(config)


def check_reach(run: _Run, node: Node) -> None:
    """Raise ConfigError if new weights or requests could not reach this machine."""
    config, addresses = run.config, run.addresses
    hosts = {*addresses.trainers, httpx.URL(addresses.router).host}
    local = hosts <= LOOPBACK
    if local and run.launcher != socket.gethostname():
        remedy = (
            f"The run listens only on the loopback of {run.launcher}: start it with an address that others can reach."
        )
        raise ConfigError("cluster.host", config.cluster.host, remedy)
    if not local and node.address in LOOPBACK:
        raise ConfigError(
            "--host", node.address, "The run is on other machines: set an address of this machine that they can reach."
        )
    trainer = addresses.trainers[0] if len(addresses.trainers) == 1 else ""
    gpu = on_gpu(config.trainer, addresses.gpus) and not config.keeps_versions
    known = (*addresses.engines, *addresses.attached)
    carried, why = choose(config.weights.transport, known, trainer, gpu=gpu)
    if carried == "tensor" and node.address not in LOOPBACK | {trainer}:
        other = "disk" if config.keeps_versions else "distributed"
        remedy = f"The run sends weights through shared memory ({why}): start it with weights.transport={other}."
        raise ConfigError("weights.transport", config.weights.transport, remedy)


# -- remove, list ----------------------------------------------------------------------------------------------


def remove(run: _Run, urls: Sequence[str]) -> None:
    """Ask engines to leave, and wait until they have. Raises ConfigError for an unknown one, DeadlineExceeded if one
    does not leave in time."""
    joined, addresses = run.registry.joined(), run.addresses
    known = [*addresses.engines, *addresses.attached, *joined]
    for url in urls:
        if url not in known:
            raise ConfigError("URL", url, f"The engines of the run are {sorted(known)}: choose among them.")
    for url in urls:
        run.registry.ask_to_leave(url)
    waiting, deadline = set(urls), time.monotonic() + LEAVE_SECONDS + TOLD_SECONDS
    while waiting := {url for url in waiting if not _has_left(run, url)}:
        if run.lease() is None:
            _say("the run has ended")
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{sorted(waiting)} to leave", LEAVE_SECONDS, "they are stopped by the process that started them"
            )
        time.sleep(1.0)
    _say(f"engines that left the run: {', '.join(urls)}")


def _has_left(run: _Run, url: str) -> bool:
    """Return whether an engine has left. An attached one is not stopped by the run: it has left when the trainer says
    so."""
    if url in run.addresses.attached:
        return run.registry.has_left(url)
    return url not in run.registry.leaving()


def listed(run: _Run) -> list[str]:
    """Return a line for each engine."""
    joined, addresses, leaving = run.registry.joined(), run.addresses, run.registry.leaving()
    kinds = {
        **dict.fromkeys(addresses.engines, "of the run"),
        **dict.fromkeys(addresses.attached, "engine.urls"),
        **{url: f"joined from {told['host']}" for url, told in joined.items()},
    }
    lines = []
    for url, kind in kinds.items():
        left = "has left" if run.registry.has_left(url) else ""
        state = "leaves" if url in leaving else left or _state(url, addresses)
        lines.append(f"{url:32} {kind:24} {state}")
    return lines


def _state(url: str, addresses: Addresses) -> str:
    try:
        response = httpx.get(f"{url}/model_info", timeout=TOLD_SECONDS, **addresses.access.http)
        version = str(response.json()["weight_version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "does not answer"
    return f"version {version}" if version.isdigit() else "waits for weights"


# -- the command -----------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(f"asyncrl-engines: {text}", flush=True)


def _told(code: int, problem: object) -> int:
    print(visible(f"asyncrl-engines: {problem}"), file=sys.stderr, flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in (
        ("add", "start engines for a run"),
        ("remove", "make engines leave a run"),
        ("list", "list the engines of a run"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("run", type=Path, metavar="RUN")
        if name == "add":
            command.add_argument("--count", type=int, help="number of engines (default: as many as fit the GPUs)")
            command.add_argument("--gpus", type=int, help="number of GPUs per machine (default: all)")
            command.add_argument(
                "--host", help="address of this machine (default: from cluster.host and cluster.interface)"
            )
        if name == "remove":
            command.add_argument("urls", nargs="+", metavar="URL")
    return parser


if __name__ == "__main__":
    sys.exit(main())
