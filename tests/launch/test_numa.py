"""A process is bound to the processors that the kernel says are near its GPUs, and to none where it says nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.launch.numa import bind, near, processors


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of four processors with a GPU each; the driver lists them out of order."""
    for bus, uuid, near_by in (("0000:9B:00.0", "GPU-b", "4-7"), ("0000:1B:00.0", "GPU-a", "0-2,3")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t X\nGPU UUID: \t {uuid}\n")
        device = tmp_path / "sys/bus/pci/devices" / bus.lower()
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(near_by + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", {0, 1, 2, 3}),
        ("1", {4, 5, 6, 7}),
        ("0,1", set(range(8))),
        ("GPU-b", {4, 5, 6, 7}),
        ("", set()),
        ("7", set()),
        ("GPU-z", set()),
    ],
)
def test_processors_are_those_near_the_gpus(machine: Path, visible: str, expected: set[int]) -> None:
    assert processors(visible, machine) == expected


def test_binding_stays_within_what_the_process_may_use(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, numbers: bound.append(set(numbers)))
    for visible in ("0", "", "9"):
        bind(near({"CUDA_VISIBLE_DEVICES": visible}, machine))
    bind(near({}, machine))
    assert bound == [{2, 3}]


def test_rank_is_bound_near_the_gpu_it_sees(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    ranks = [{"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": rank} for rank in ("0", "1")]
    assert [near(rank, machine) for rank in ranks] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert near({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "1"}, machine) == set()
