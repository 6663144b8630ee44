"""What this machine offers a run: GPUs, found without torch, and ports."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from asyncrl.config import Config
from asyncrl.launch.plan import Ports
from asyncrl.ports import free_ports


def count_gpus(configured: int | None) -> int:
    """GPUs to use: the configured number, or CUDA_VISIBLE_DEVICES, or the device files of the NVIDIA driver."""
    if configured is not None:
        return configured
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def choose_ports(config: Config) -> Ports:
    """Ports for everything in the run that others connect to."""
    engines, teachers, judges = config.engine.count, config.teacher.started, config.judge.started
    found = iter(free_ports(config.cluster.host, 2 * (engines + teachers + judges) + 4))
    return Ports(
        engines=list(islice(found, engines)),
        engine_ranks=list(islice(found, engines)),
        teachers=list(islice(found, teachers)),
        teacher_ranks=list(islice(found, teachers)),
        judges=list(islice(found, judges)),
        judge_ranks=list(islice(found, judges)),
        router=next(found),
        router_metrics=next(found),
        rollout=next(found),
        trainer=next(found),
    )
