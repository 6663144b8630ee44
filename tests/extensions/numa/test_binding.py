"""A process is bound to the processors that the kernel says are near its GPUs, and to none where it says nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.numa.binding import bind, near, processors
from asyncrl.extensions.numa.extension import BINDING, NumaHooks
from asyncrl.launch.plan import ProcessSpec
from tests.fakes import tiny_config


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


def spec(argv: list[str], visible: str) -> ProcessSpec:
    nobody: Any = None
    given = ProcessSpec("trainer-0", argv, {"CUDA_VISIBLE_DEVICES": visible})
    return NumaHooks().changed(tiny_config(), given, nobody, Path())


def test_process_with_gpus_becomes_itself_once_it_is_bound() -> None:
    shows = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv, len(os.sched_getaffinity(0))]))"
    argv = spec([sys.executable, "-c", shows, "a word", "-m"], "0").argv
    assert argv[:3] == [sys.executable, "-m", BINDING]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    said, _ = running.communicate(timeout=60)
    assert json.loads(said) == [running.pid, ["-c", "a word", "-m"], len(os.sched_getaffinity(0))]


@pytest.mark.parametrize(("first", "visible"), [(sys.executable, ""), ("/usr/bin/router", "0")])
def test_process_without_gpus_or_python_starts_as_it_is(first: str, visible: str) -> None:
    assert spec([first, "-m", "x"], visible).argv == [first, "-m", "x"]
