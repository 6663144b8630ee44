"""Output of nvidia-smi and control groups is read correctly and arrives complete from another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.launch import machine
from asyncrl.launch.machine import Gpu, MachineFacts, parse_gpus, this_machine

TWO = """\
0, NVIDIA H100 80GB HBM3, 81559, GPU-6b3f7d8e-2d0e-9c1f-6f4e-0a2b5c7d9e11
1, NVIDIA H100 80GB HBM3, 81559, GPU-0d9e8f7a-6b5c-4d3e-2f1a-0b9c8d7e6f55
"""
"""In the format that --format=csv,noheader,nounits has; no GPU was at hand to record it from."""


def test_lines_of_nvidia_smi_are_index_name_mebibytes_and_uuid() -> None:
    first, second = parse_gpus(TWO)
    assert first == Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-6b3f7d8e-2d0e-9c1f-6f4e-0a2b5c7d9e11")
    assert (second.index, second.memory) == (1, 81559 << 20)


def test_what_is_no_device_is_left_out() -> None:
    said = "No devices were found\n\nUnable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n"
    assert parse_gpus(said) == []
    for line in (
        "0, NVIDIA GH200 480GB, [N/A], GPU-1",
        "[N/A], NVIDIA H100, 81559, GPU-1",
        "0, it, 81559, GPU-1, more",
    ):
        assert parse_gpus(f"{line}\n{TWO}") == parse_gpus(TWO)


def test_gpus_are_named_by_index_or_by_uuid() -> None:
    here = MachineFacts("node0", gpus=tuple(parse_gpus(TWO)))
    assert [one.index for one in here.visible(["1"])] == [1]
    assert [one.index for one in here.visible(["GPU-0d9e"])] == [1]
    assert here.visible(["7"]) == here.visible([""]) == []


def test_the_lowest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (tmp_path / "memory.max").write_text("1")  # of something else
    for folder, limit in ((".", "max"), ("slurm", "9000"), ("slurm/job", "4000"), ("slurm/job/step", "max")):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "memory.max").write_text(limit + "\n")
    assert min(machine._limits(root, "/slurm/job/step")) == 4000
    assert machine._limits(root, "/other") == []
    assert machine._limits(root, "/slurm/job/without") == [4000, 9000]  # one that tells none of its own


def test_memory_is_what_processes_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = this_machine("node3", {}).memory
    monkeypatch.setattr(machine, "_limits", lambda root, group: [4000, 9000])
    assert this_machine("node3", {}).memory == 4000
    monkeypatch.setattr(machine, "_limits", lambda root, group: [1 << 60])
    assert this_machine("node3", {}).memory >= whole


@pytest.mark.parametrize(("end", "count"), [("exit 0", 2), ("exit 9", 0), ("exec sleep 60", 0)])
def test_a_driver_that_fails_or_hangs_shows_no_gpu(
    end: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\ncat <<END\n{TWO}END\n{end}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "SMI_SECONDS", 1.0)
    assert len(this_machine("node3", {}).gpus) == count


def test_nvcc_is_the_one_that_sglang_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("cuda/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvcc").touch(mode=0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    assert this_machine("", {}).nvcc == str(tmp_path / "path" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert this_machine("", {}).nvcc == str(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))  # SGLang looks nowhere else
    assert this_machine("", {}).nvcc == ""


def test_a_machine_knows_its_memory() -> None:
    assert this_machine("node3", {"torch": "2.13.0"}).memory > 1 << 30
