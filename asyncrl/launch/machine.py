"""What this machine offers a run: its address and free ports, its GPUs (found without torch), its memory and its
packages."""

from __future__ import annotations

import csv
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Node
from asyncrl.network.ports import free_block, free_ports

ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): no machine has it, and it lies behind the default route."""
LEAST_FILES = 1024
"""Open files that each process of a run must be allowed: libraries, sockets and requests in flight."""
SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits")
SMI_SECONDS = 20.0


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


@dataclass(frozen=True)
class Gpu:
    """A device as listed by nvidia-smi."""

    index: int
    name: str
    memory: int  # bytes
    uuid: str


@dataclass(frozen=True)
class MachineFacts:
    """Facts about one machine. Unknown ones are empty, or 0."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    memory: int = 0
    """Bytes available to its processes together: the machine's memory, or the limit of their control group."""
    nvcc: str = ""
    """The CUDA compiler that SGLang would call."""

    def visible(self, names: Iterable[str]) -> list[Gpu]:
        """Return the GPUs with these names in CUDA_VISIBLE_DEVICES: an index, or a prefix of the UUID."""
        wanted = list(names)
        return [
            one for one in self.gpus if str(one.index) in wanted or any(one.uuid.startswith(w) for w in wanted if w)
        ]


def this_machine(name: str, versions: dict[str, str]) -> MachineFacts:
    """Return the facts about this machine."""
    return MachineFacts(name, versions, tuple(_gpus()), _memory(), _nvcc())


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's output. Devices without an index or a memory size, and other lines, are skipped."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 4 and row[0].strip().isdigit() and row[2].strip().isdigit():
            index, name, mebibytes, uuid = (word.strip() for word in row)
            found.append(Gpu(int(index), name, int(mebibytes) << 20, uuid))
    return found


def _gpus() -> list[Gpu]:
    if shutil.which(SMI[0]) is None:
        return []
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def _nvcc() -> str:
    """Return the path of nvcc, found as SGLang and tvm-ffi find it (sglang/kernels/jit/utils/arch.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return str(found) if found.is_file() else ""


def _memory() -> int:
    return min([psutil.virtual_memory().total, *_limits(Path("/sys/fs/cgroup"), _own_group())])


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")


def _limits(root: Path, group: str) -> list[int]:
    """Return the memory limits of the control group and its ancestors (version 2)."""
    folder, found = root / group.strip("/"), []
    for one in (folder, *folder.parents):
        if not one.is_relative_to(root):
            break
        try:
            word = (one / "memory.max").read_text().strip()
        except OSError:
            continue
        found += [int(word)] if word.isdigit() else []
    return found
