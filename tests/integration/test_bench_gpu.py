"""The parts of scripts/bench_gpu.py are executed on a CPU before a GPU executes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_gpu import parts

ROOT = Path(__file__).parents[2]


def rehearsed(folder: Path, *names: str) -> None:
    """Rehearse these parts, and check that they give figures."""
    command = [sys.executable, "scripts/bench_gpu.py", "--rehearse", "--quick", "--out", str(folder), "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + (folder / "bench_gpu.md").read_text()
    found = json.loads((folder / "bench_gpu.json").read_text())
    assert [part["name"] for part in found["parts"]] == list(names)
    assert all(part["figures"] and part["status"] == "ok" for part in found["parts"])
    assert found["rehearsal"]


@pytest.mark.campaign  # publishes, pauses and runs have tests of their own
def test_a_part_is_rehearsed(tmp_path: Path) -> None:
    rehearsed(tmp_path, "mfu-moe")


@pytest.mark.campaign
def test_all_parts_are_rehearsed(tmp_path: Path) -> None:
    rehearsed(tmp_path, *(part.name for part in parts(quick=True, rehearse=True)))
