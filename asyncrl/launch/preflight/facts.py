"""What a machine tells of itself, beside what placement needs (launch/machine.py): packages, GPUs, memory."""

from __future__ import annotations

import csv
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
    """A device as nvidia-smi lists it."""

    index: int
    name: str
    memory: int  # bytes
    uuid: str


@dataclass(frozen=True)
class Machine:
    """Facts of one machine. What could not be learnt is empty, or 0."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    memory: int = 0
    """Bytes that its processes may take together: the machine's, or the limit of their control group."""

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> Machine:
        """From JSON."""
        return cls(**{**told, "gpus": tuple(Gpu(**one) for one in told["gpus"])})

    def visible(self, names: Iterable[str]) -> list[Gpu]:
        """Those that CUDA_VISIBLE_DEVICES calls so: by index, or by the beginning of the uuid."""
        wanted = list(names)
        return [
            one for one in self.gpus if str(one.index) in wanted or any(one.uuid.startswith(w) for w in wanted if w)
        ]


def this_machine(name: str, versions: dict[str, str]) -> Machine:
    """Facts of this one."""
    return Machine(name, versions, tuple(_gpus()), _memory())


def parse_gpus(text: str) -> list[Gpu]:
    """nvidia-smi's lines. Those of devices that tell no number are left out, as is what is no such line."""
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


def _memory() -> int:
    return min([psutil.virtual_memory().total, *_limits(Path("/sys/fs/cgroup"), _own_group())])


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")


def _limits(root: Path, group: str) -> list[int]:
    """Of the control group and all above it (version 2)."""
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
