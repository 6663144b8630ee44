"""Process specifications of a run, derived from configuration, addresses and placement. Pure."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl import lookup, platforms
from asyncrl.config import AuxiliaryModelConfig, Config, EngineConfig, on_gpu
from asyncrl.engine.router import router_argv
from asyncrl.engine.server import (
    DETERMINISTIC_ENV,
    NO_PROXY,
    deterministic_args,
    frozen_argv,
    server_argv,
)
from asyncrl.launch.placement import Placement, Seat
from asyncrl.network.addresses import ARGUMENTS, Addresses
from asyncrl.network.tls import signed

PORTS = ("--port", "--nccl-port", "--dist-init-addr", "--prometheus-port")
"""Arguments that are passed through the environment: every user of the machine can read a command line, seconds before
its process listens."""
CUMEM = "NCCL_CUMEM_ENABLE"
ROUTER_PATIENCE = 30.0
"""Seconds that the router may take to answer: it computes nothing, but its machine may be busy."""


@dataclass(frozen=True)
class ProcessSpec:
    """Specification of one process of the run. `name` is also the name of its log."""

    name: str
    argv: list[str]
    env: dict[str, str]
    ends_the_run: bool = False  # exit code 0 means that the run succeeded; anything else is a failure
    restarts: int = 0  # maximum number of restarts after it dies during the run
    url: str = ""  # URL of an engine of the policy
    watch: str = ""  # URL that is queried to detect a hang
    patience: float = 0.0  # timeout of that query, in seconds
    stop_signal: int = signal.SIGTERM
    node: str = ""  # its machine, if the run has several
    step: bool = False  # whether argv runs it on another machine: forwards signals, and kills it on SIGTERM
    shares: bool = False  # whether it is not started again while trainers use its GPUs (addresses.TRAINING)
    reports: bool = False  # whether it reports its progress in a file (progress.py)
    recovers: bool = False  # whether it goes on where it died, so that its deaths are counted by steps
    together: str = ""  # processes with the same value live and die together: trainers, ranks of one engine

    @property
    def kind(self) -> str:
        """Return its name without its number."""
        return self.name.partition("-")[0]

    @property
    def killed_at_once(self) -> bool:
        """Return whether it is killed without being asked to stop, because it has no state to save. (On SIGTERM a step
        is killed.)"""
        return self.stop_signal == (signal.SIGTERM if self.step else signal.SIGKILL)


def plan(config: Config, addresses: Addresses, placement: Placement, run_dir: Path) -> list[ProcessSpec]:
    """Return the specifications of engines (also of models that are not trained), router, rollout process, trainer
    ranks and what extensions add. All are started at once and run concurrently."""
    trainers = _trainers(config, addresses, placement, run_dir)
    program = config.own_mode.program if config.own_mode else ""
    hooks = [one.launch() for one in lookup.active(config).values()]
    more = [spec for one in hooks for spec in one.processes(config, addresses, placement, run_dir)]
    if not config.generates:
        return _changed(config, addresses, run_dir, [*more, *trainers])
    shown = signed(run_dir, addresses.router)
    router, hidden = _without_ports(router_argv(config.engine, addresses.router, placement.router.meeting, shown))
    others = [
        *_frozen(config, addresses, placement, run_dir),
        ProcessSpec(
            "router",
            router,
            {**_shared_env(addresses, placement.router), **NO_PROXY, **hidden},
            node=placement.router.node.name,
            restarts=_restarts(config),
            watch=f"{addresses.router}/health",
            stop_signal=signal.SIGKILL,  # on SIGTERM smg waits for 5 s; its clients have ended, and it has no files
            patience=min(ROUTER_PATIENCE, config.weights.timeout),
        ),
        replace(
            rollout_process(program or "asyncrl.rollout", addresses, placement.rollout, run_dir),
            ends_the_run=bool(program),
            reports=True,
            **_recovery(config),
        ),
        *more,
        *(trainers if config.trains else []),
    ]
    return [
        *engines(config, addresses, placement.engines, run_dir),
        *_changed(config, addresses, run_dir, others),
    ]


def _changed(config: Config, addresses: Addresses, run_dir: Path, specs: list[ProcessSpec]) -> list[ProcessSpec]:
    """Return the specifications as extensions change them."""
    for one in lookup.active(config).values():
        specs = [one.launch().changed(config, spec, addresses, run_dir) for spec in specs]
    return specs


def rollout_process(module: str, addresses: Addresses, seat: Seat, run_dir: Path) -> ProcessSpec:
    """Return the specification of the rollout process, or of another one of its kind, which runs this module."""
    env = {**_shared_env(addresses, seat), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", module, str(run_dir)]
    return ProcessSpec("rollout", argv, env, node=seat.node.name, reports=module == "asyncrl.rollout")


def _without_ports(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Remove the port arguments from a command of the SGLang or router wrappers. Return the rest, and the environment
    variable that passes them."""
    places = {place for word in PORTS if word in argv for place in (argv.index(word), argv.index(word) + 1)}
    hidden = [word for place, word in enumerate(argv) if place in places]
    return [word for place, word in enumerate(argv) if place not in places], {ARGUMENTS: shlex.join(hidden)}


def _restarts(config: Config) -> int:
    return config.cluster.max_restarts if config.cluster.on_engine_death == "restart" else 0


def _recovery(config: Config) -> dict[str, Any]:
    """Return the fields of processes that go on where they died."""
    return {"restarts": config.cluster.max_restarts, "recovers": True} if config.recovers else {}


def _shared_env(addresses: Addresses, seat: Seat) -> dict[str, str]:
    """Return the environment of every process. It sets one thread per process: with more, processes that share cores
    slow each other down a hundredfold."""
    interface = seat.node.interface or ("lo" if seat.node.address.startswith("127.") else "")
    named = dict.fromkeys(INTERFACES, interface) if interface else {}
    return {
        **named,
        "ASYNCRL_HOST": seat.node.address,
        "ASYNCRL_RUN_ID": addresses.run_id,
        "ASYNCRL_API_KEY": addresses.api_key,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",  # everything is local: an unreachable hub must not cost retries
    }


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that set the network interface of collectives; by default they resolve this machine's name, which may be
its loopback."""


def engines(
    config: Config,
    addresses: Addresses,
    seats_of: list[list[Seat]],
    run_dir: Path,
    label: str = "",
    seed: int = 0,
) -> list[ProcessSpec]:
    """Return the specifications of the policy's engines, as extensions change them. `label` distinguishes the names of
    engines that are started later."""
    gpu = on_gpu(config.engine, addresses.gpus)
    specs = []
    # an IPC handle can only be opened where the trainer's GPU is visible
    by_ipc = config.weights.transport in (("auto", "tensor") if config.cluster.shares_gpus else ("tensor",))
    for number, seats in enumerate(seats_of):
        for place, seat in enumerate(seats):  # if several: one per machine, of which the first answers
            full = server_argv(
                config.engine,
                addresses.model,
                seat.url,
                gpu=gpu,
                seed=config.run.seed + seed + number,
                custom_weight_loader=config.weight_loader,
                base_gpu_id=seat.gpus[0] if gpu and by_ipc else None,
                nccl_port=seat.meeting if len(seats) == 1 else None,
                mem_fraction_static=config.engine_fraction if gpu else None,
                **lookup.engine_arguments(config, gpu=gpu),
                **_shown(run_dir, seat.url),
                **(_spanning(seats, place) if len(seats) > 1 else {}),
                **(deterministic_args(gpu=gpu) if config.deterministic else {}),
            )
            env = {
                **_nccl_env(config.engine),
                **(DETERMINISTIC_ENV if config.deterministic else {}),
                **({"CUDA_VISIBLE_DEVICES": ",".join(seat.node.gpus)} if gpu and by_ipc else {}),
            }
            name = f"engine-{label}{number}"
            spec = _engine(f"{name}.{place}" if place else name, full, env, config, config.engine, addresses, seat)
            together = name if len(seats) > 1 else ""
            url, watch = ("", "") if place else (seat.url, spec.watch)  # the first one answers
            specs.append(replace(spec, together=together, url=url, watch=watch))
    return _changed(config, addresses, run_dir, specs)


def _engine(
    name: str,
    full: list[str],
    env: Mapping[str, str],
    config: Config,
    section: EngineConfig | AuxiliaryModelConfig,
    addresses: Addresses,
    seat: Seat,
) -> ProcessSpec:
    """Return the specification of an engine of any model: its whole command line, and its environment beyond that of
    every engine."""
    argv, hidden = _without_ports(full)
    platform = platforms.chosen(gpu=on_gpu(section, addresses.gpus))
    env = {
        **_shared_env(addresses, seat),
        **hidden,
        **platform.environment,
        **platform.engine_environment(section.ranks),
        **lookup.engine_environment(config),
        "CUDA_VISIBLE_DEVICES": seat.visible,
        **env,
    }
    return ProcessSpec(
        name,
        argv,
        env,
        stop_signal=signal.SIGKILL,  # on SIGTERM SGLang drains its requests, for which nobody waits; it owns no files
        restarts=_restarts(config),
        watch=f"{seat.url}/server_info",  # answered by its scheduler, not just the server
        patience=config.weights.timeout,
        node=seat.node.name,
    )


def _nccl_env(engine: EngineConfig) -> dict[str, str]:
    """Return the NCCL settings that trainers and engines must share before their first communicator.

    NCCL chooses the form of a memory handle by its own process's setting, on both ends. SGLang turns cuMem off unless
    the environment says otherwise, and always turns it on for symmetric memory.
    """
    if engine.server_args.get("enable_symm_mem"):
        return {CUMEM: "1"}
    return {CUMEM: os.environ.get(CUMEM, "0")}


def _shown(run_dir: Path, url: str) -> dict[str, object]:
    """Return the SGLang arguments for TLS, if the run has certificates."""
    files = signed(run_dir, url)
    if not files:
        return {}
    return {"ssl_certfile": files.server, "ssl_keyfile": files.server, "ssl_ca_certs": files.authority}


def _spanning(seats: list[Seat], place: int) -> dict[str, object]:
    """Return the SGLang arguments of an engine that spans several machines."""
    meeting = f"{seats[0].node.address}:{seats[0].meeting}"
    return {"nnodes": len(seats), "node_rank": place, "dist_init_addr": meeting}


def _frozen(config: Config, addresses: Addresses, placement: Placement, run_dir: Path) -> list[ProcessSpec]:
    """Return the specifications of the engines of models that are not trained. They are queried directly: neither the
    router nor the trainer's publishes include them."""
    specs = []
    for role, seats in placement.frozen.items():
        section = config.frozen[role]
        for number, seat in enumerate(seats):
            gpu = on_gpu(section, addresses.gpus)
            # SGLang needs a port for each replica of the whole model (dp_size); those of attention share one.
            port = seat.meeting if int(section.server_args.get("dp_size") or 1) == 1 else None
            shown = {"nccl_port": port, **_shown(run_dir, seat.url)}
            full = frozen_argv(section, addresses.frozen_models[role], seat.url, gpu=gpu, **shown)
            specs.append(_engine(f"{role}-{number}", full, {}, config, section, addresses, seat))
    return specs


def _trainers(config: Config, addresses: Addresses, placement: Placement, run_dir: Path) -> list[ProcessSpec]:
    """Return the specifications of the trainer ranks, with torchrun's environment variables.

    The supervisor starts them itself instead of torchrun, so that each has its own log and exit code.
    """
    gpu = on_gpu(config.trainer, addresses.gpus)
    seats = placement.trainers
    specs = []
    for rank, seat in enumerate(seats):
        env = {
            **_shared_env(addresses, seat),
            **platforms.chosen(gpu=gpu).environment,
            **_nccl_env(config.engine),
            **(DETERMINISTIC_ENV if config.deterministic else {}),
            "OMP_NUM_THREADS": str(config.trainer.threads),
            "CUDA_VISIBLE_DEVICES": seat.visible,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(placement.local_rank(rank)),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in seats)),
            "MASTER_ADDR": seats[0].node.address,
            "MASTER_PORT": str(seats[0].port),
        }
        specs.append(
            ProcessSpec(
                f"trainer-{rank}",
                [sys.executable, "-m", "asyncrl.trainer", str(run_dir)],
                env,
                ends_the_run=True,
                node=seat.node.name,
                reports=True,
                together="trainers",
                **_recovery(config),
            )
        )
    return specs
