"""What to start: from a configuration and addresses to process specifications. Pure."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.addresses import Addresses
from asyncrl.config import Config, Engine, Frozen, Teacher, on_gpu
from asyncrl.engine.router import router_argv
from asyncrl.engine.server import (
    DELTA_LOADER,
    DETERMINISTIC_ENV,
    deterministic_args,
    judge_argv,
    server_argv,
    server_env,
    teacher_argv,
)

ROUTER_PATIENCE = 30.0
"""Seconds: it computes nothing, but a machine may be busy."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process of the run. `name` is also the name of its log."""

    name: str
    argv: list[str]
    env: dict[str, str]
    ends_the_run: bool = False  # its clean exit is the run's success; any other end is a failure
    restarts: int = 0  # how often it is started again when it dies while the run is under way
    url: str = ""  # where an engine of the policy listens
    watch: str = ""  # what is asked to tell whether it hangs
    patience: float = 0.0  # seconds that it may take to answer
    stop_signal: int = signal.SIGTERM


@dataclass(frozen=True)
class Ports:
    """Free ports, chosen together."""

    engines: list[int]
    engine_ranks: list[int]  # where the ranks of each engine find each other
    router: int
    router_metrics: int
    rollout: int
    trainer: int
    teachers: list[int] = field(default_factory=list)
    teacher_ranks: list[int] = field(default_factory=list)
    judges: list[int] = field(default_factory=list)
    judge_ranks: list[int] = field(default_factory=list)


def plan(
    config: Config, addresses: Addresses, ports: Ports, run_dir: Path, visible_gpus: str | None
) -> list[ProcessSpec]:
    """Engines, those of teacher and judge, router, rollout process, trainer ranks: all started at once, side by side.

    `visible_gpus` is the launcher's own CUDA_VISIBLE_DEVICES, or None: trainers get the first, engines the next, and
    the engines of teacher and judge those after them.
    """
    numbers = visible_gpus.split(",") if visible_gpus else [str(number) for number in range(addresses.gpus)]
    trainers = _trainers(config, addresses, ports, run_dir, numbers)
    if config.mode == "replay":
        again = [_rollout("asyncrl.rollout.reenact", addresses, run_dir)] if config.replay.schedule else []
        return [*again, *trainers]
    return [
        *_engines(config, addresses, ports, numbers),
        *_frozen(config, addresses, ports, numbers),
        ProcessSpec(
            "router",
            router_argv(config.engine, addresses.router, ports.router_metrics),
            _shared_env(addresses),
            restarts=_restarts(config),
            watch=f"{addresses.router}/health",
            patience=min(ROUTER_PATIENCE, config.weights.timeout),
        ),
        _rollout("asyncrl.rollout", addresses, run_dir),
        *([_collector(addresses, run_dir)] if config.mode == "rollout_only" else trainers),
    ]


def _rollout(module: str, addresses: Addresses, run_dir: Path) -> ProcessSpec:
    judges = " ".join(f"{url}/v1" for url in addresses.judges)
    env = {**_shared_env(addresses), "CUDA_VISIBLE_DEVICES": "", **({"ASYNCRL_JUDGES": judges} if judges else {})}
    return ProcessSpec("rollout", [sys.executable, "-m", module, str(run_dir)], env)


def _collector(addresses: Addresses, run_dir: Path) -> ProcessSpec:
    """In the trainers' place."""
    argv = [sys.executable, "-m", "asyncrl.collect", str(run_dir)]
    return ProcessSpec("collect", argv, {**_shared_env(addresses), "CUDA_VISIBLE_DEVICES": ""}, ends_the_run=True)


def _restarts(config: Config) -> int:
    return config.cluster.max_restarts if config.cluster.on_engine_death == "restart" else 0


def _shared_env(addresses: Addresses) -> dict[str, str]:
    """One thread per process: with more, processes that share cores slow each other down a hundredfold."""
    return {
        "ASYNCRL_RUN_ID": addresses.run_id,
        "ASYNCRL_API_KEY": addresses.api_key,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # everything is local: a hub that cannot be reached must not cost a retry
    }


# On CPU glibc gives every large tensor back to the kernel and gets it anew, zeroed, page by page: eight times the cost
# of a copy into memory that was touched before. This keeps what was freed for the next.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}


def _engines(config: Config, addresses: Addresses, ports: Ports, numbers: list[str]) -> list[ProcessSpec]:
    gpu = on_gpu(config.engine, addresses.gpus)
    first_gpu = _gpus_of_trainers(config, addresses.gpus)
    specs = []
    by_ipc = config.weights.transport == "tensor"  # a handle opens only where the trainer's GPU is seen
    for number, url in enumerate(addresses.engines):
        first = first_gpu + number * config.engine.tensor_parallel
        argv = server_argv(
            config.engine,
            addresses.model,
            url,
            gpu=gpu,
            seed=config.run.seed + number,
            custom_weight_loader=DELTA_LOADER if config.weights.transport == "delta" else None,
            base_gpu_id=first if gpu and by_ipc else None,
            nccl_port=_meeting(config.engine, ports.engine_ranks[number]),
            enable_return_routed_experts=config.algo.routing_replay == "R3" or None,
            **(deterministic_args(gpu=gpu) if config.deterministic else {}),
        )
        own = numbers if by_ipc else numbers[first : first + config.engine.tensor_parallel]
        visible = ",".join(own) if gpu else ""
        env = {
            **_shared_env(addresses),
            **({} if gpu else KEEP_MEMORY),
            **server_env(config.engine, gpu=gpu),
            **(DETERMINISTIC_ENV if config.deterministic else {}),
            "CUDA_VISIBLE_DEVICES": visible,
        }
        # on SIGTERM SGLang drains its requests in steps of 5 s; here nobody waits for them, and an engine owns no files
        specs.append(
            ProcessSpec(
                f"engine-{number}",
                argv,
                env,
                stop_signal=signal.SIGKILL,
                restarts=_restarts(config),
                url=url,
                watch=f"{url}/server_info",  # its scheduler answers, not the HTTP server alone
                patience=config.weights.timeout,
            )
        )
    return specs


def _frozen(config: Config, addresses: Addresses, ports: Ports, numbers: list[str]) -> list[ProcessSpec]:
    """Engines of the teacher and of the judge. They are asked directly: neither the router nor the trainer's publishes
    know them."""
    taken = _gpus_of_trainers(config, addresses.gpus)
    if on_gpu(config.engine, addresses.gpus):
        taken += config.engine.count * config.engine.tensor_parallel
    specs = []
    for name, section, folder, urls, ranks in (
        ("teacher", config.teacher, addresses.teacher, addresses.teachers, ports.teacher_ranks),
        ("judge", config.judge, addresses.judge, addresses.judges, ports.judge_ranks),
    ):
        if not section.started:
            continue
        assert folder is not None
        gpu = on_gpu(section, addresses.gpus)
        for number, (url, rank) in enumerate(zip(urls, ranks, strict=True)):
            meeting = _meeting(section, rank)
            if isinstance(section, Teacher):
                argv = teacher_argv(section, folder, url, gpu=gpu, nccl_port=meeting)
            else:
                argv = judge_argv(section, folder, url, gpu=gpu, nccl_port=meeting)
            first, taken = taken, taken + section.tensor_parallel * gpu
            env = {
                **_shared_env(addresses),
                **({} if gpu else KEEP_MEMORY),
                **server_env(section, gpu=gpu),
                "CUDA_VISIBLE_DEVICES": ",".join(numbers[first:taken]),
            }
            specs.append(
                ProcessSpec(
                    f"{name}-{number}",
                    argv,
                    env,
                    stop_signal=signal.SIGKILL,
                    restarts=_restarts(config),
                    watch=f"{url}/server_info",
                    patience=config.weights.timeout,
                )
            )
    return specs


def _gpus_of_trainers(config: Config, gpus: int) -> int:
    trains = config.mode != "rollout_only" and on_gpu(config.trainer, gpus)
    return config.trainer.world_size if trains else 0


def _meeting(section: Engine | Frozen, port: int) -> int | None:
    """Where the ranks of an engine meet; with replicas SGLang wants a port for each of them."""
    return port if int(section.server_args.get("dp_size") or 1) == 1 else None


def _trainers(
    config: Config, addresses: Addresses, ports: Ports, run_dir: Path, numbers: list[str]
) -> list[ProcessSpec]:
    """Ranks under torchrun's environment contract.

    The supervisor starts them itself: each has a log and an exit of its own, and no agent stands between.
    """
    gpu = on_gpu(config.trainer, addresses.gpus)
    world = config.trainer.world_size
    specs = []
    for rank in range(world):
        env = {
            **_shared_env(addresses),
            **({} if gpu else KEEP_MEMORY),
            **(DETERMINISTIC_ENV if config.deterministic else {}),
            "OMP_NUM_THREADS": str(config.trainer.threads),
            "CUDA_VISIBLE_DEVICES": ",".join(numbers[:world]) if gpu else "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": config.cluster.host,
            "MASTER_PORT": str(ports.trainer),
        }
        specs.append(
            ProcessSpec(
                f"trainer-{rank}",
                [sys.executable, "-m", "asyncrl.trainer", str(run_dir)],
                env,
                ends_the_run=True,
            )
        )
    return specs
