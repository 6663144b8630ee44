"""NUMA binding: CPUs near a process's GPUs. On a machine with several sockets, memory and interrupts of the other
sockets are remote.

    python -m asyncrl.extensions.numa.binding ARGUMENTS      binds itself, and becomes python ARGUMENTS

The topology is read from the driver and the kernel, without CUDA. If it is unknown, nothing is bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")


def near(environment: Mapping[str, str], root: Path = ROOT) -> set[int]:
    """Return the CPUs near the GPUs of a process with this environment, among those that this process may use. A
    trainer rank sees all GPUs of its machine's trainers, and uses one."""
    visible, rank = environment.get("CUDA_VISIBLE_DEVICES", ""), environment.get("LOCAL_RANK")
    own = visible.split(",")[int(rank)] if visible and rank else visible
    return processors(own, root) & os.sched_getaffinity(0)


def bind(cpus: set[int]) -> None:
    """Bind this process to these CPUs, if there are any."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def processors(visible: str, root: Path = ROOT) -> set[int]:
    """Return the CPUs near these GPUs (a value of CUDA_VISIBLE_DEVICES); an empty set if they are unknown."""
    known = _by_bus(root)
    found: set[int] = set()
    for name in filter(None, visible.split(",")):
        bus = known[int(name)][0] if name.isdigit() and int(name) < len(known) else _of_uuid(name, known)
        file = root / "sys/bus/pci/devices" / bus.lower() / "local_cpulist"
        if not bus or not file.is_file():
            return set()
        found |= _numbers(file.read_text())
    return found


def _by_bus(root: Path) -> list[tuple[str, str]]:
    """Return the bus address and UUID of each GPU, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = (folder / "information").read_text().splitlines() if (folder / "information").is_file() else []
        uuid = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("GPU UUID")), "")
        found.append((folder.name, uuid))
    return found


def _of_uuid(name: str, known: list[tuple[str, str]]) -> str:
    return next((bus for bus, uuid in known if name and uuid.startswith(name)), "")


def _numbers(text: str) -> set[int]:
    """Parse a list in the kernel's format: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


if __name__ == "__main__":
    bind(near(os.environ))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
