"""What this machine offers: GPUs and free ports, found without torch."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.launch.plan import Ports

# below Linux's ephemeral range: no outgoing connection can take one meanwhile
FIRST_PORT, LAST_PORT = 20000, 32000


def count_gpus(configured: int | None) -> int:
    """GPUs to use: the configured number, or CUDA_VISIBLE_DEVICES, or the device files of the NVIDIA driver."""
    if configured is not None:
        return configured
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def choose_ports(config: Config) -> Ports:
    """Ports that were free a moment ago. SGLang derives further ports from its own, so engines stand apart."""
    held: list[socket.socket] = []
    try:
        ports = [_free(config.cluster.host, held) for _ in range(config.engine.count + 4)]
    finally:
        for one in held:
            one.close()
    *engines, router, router_metrics, rollout, trainer = ports
    return Ports(engines, router, router_metrics, rollout, trainer)


def _free(host: str, held: list[socket.socket]) -> int:
    for _ in range(200):
        candidate = socket.socket()
        try:
            candidate.bind((host, random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)))
        except OSError:
            candidate.close()
            continue
        held.append(candidate)
        return int(candidate.getsockname()[1])
    raise AsyncRLError(
        f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}: is cluster.host an address of this machine?"
    )
