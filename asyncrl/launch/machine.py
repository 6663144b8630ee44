"""The resources that this machine offers a run: its address, its GPUs (found without torch), and free ports."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Node
from asyncrl.network.ports import free_block, free_ports

ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): no machine has it, and it lies behind the default route."""
LEAST_FILES = 1024
"""Open files that each process of a run must be allowed: libraries, sockets and requests in flight."""


def allow_files() -> None:
    """Let this process and its children open as many files as the hard limit says. Raises ConfigError if that is too
    few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < LEAST_FILES:  # -1: unlimited
        remedy = f"Processes of a run open more files: allow at least {LEAST_FILES} (ulimit -n, LimitNOFILE=)."
        raise ConfigError("ulimit -n", hard, remedy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def count_gpus(configured: int | None) -> int:
    """Return the number of GPUs to use: as configured, or from CUDA_VISIBLE_DEVICES, or from the NVIDIA driver's device
    files."""
    if configured is not None:
        return configured
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def this_node(host: str | None, interface: str | None, gpus: int, ports: int, block: int = 0) -> Node:
    """Describe this machine with this many of its GPUs and free ports, and with a block of this many consecutive ones.
    `host` is its address; if unset, the address of `interface`, or of the route to other machines. Raises ConfigError
    if there is no such interface, AsyncRLError if the address does not belong to this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",")[:gpus] if visible and gpus else [str(number) for number in range(gpus)]
    name = ""
    if host is None:
        host, name = _address(interface)
    first = free_block(host, block) if block else 0
    return Node("", host, tuple(numbers), tuple(free_ports(host, ports)), name, first)


def _address(interface: str | None) -> tuple[str, str]:
    """Return the IPv4 address and its interface."""
    known = {
        name: one.address
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET
    }
    if interface is not None:
        if interface not in known:
            raise ConfigError(
                "cluster.interface",
                interface,
                f"{socket.gethostname()} has the interfaces {sorted(known)}: choose one of them.",
            )
        return known[interface], interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end, suppress(OSError):
        end.connect((ELSEWHERE, 9))  # sends nothing, only asks the kernel for the route
        mine = end.getsockname()[0]
        return mine, next((name for name, address in known.items() if address == mine), "")
    outward = [(address, name) for name, address in known.items() if not address.startswith("127.")]
    return outward[0] if outward else ("127.0.0.1", "")
