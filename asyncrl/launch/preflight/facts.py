"""Facts about a machine beyond those that placement needs (launch/machine.py): packages, GPUs, memory."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits")
SMI_SECONDS = 20.0


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

    def told(self) -> dict[str, Any]:
        """Return the facts as values for JSON."""
        return asdict(self)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> MachineFacts:
        """Create a Machine from JSON values."""
        return cls(**{**told, "gpus": tuple(Gpu(**one) for one in told["gpus"])})

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
