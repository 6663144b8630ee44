"""Tests of the preflight in an allocation of two virtual machines with a network (tests/extensions/slurm/lab.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extensions.slurm.lab import Lab, missing, missing_networks

REASON = missing() or missing_networks()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(REASON), reason=REASON)]
RUN = ("experiment=tiny", "cluster=slurm", "cluster.gpus=0", "trainer.data_parallel=2", "cluster.trainer_nodes=2")
TIMEOUT = 600.0


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="lab-"))  # short: sockets lie in it
    try:
        with Lab(folder, ["node1", "node2"], apart=True) as opened:
            yield opened
    finally:
        shutil.rmtree(folder)


def allocated(lab: Lab, run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an allocation of both machines."""
    program = [sys.executable, "-m", "asyncrl.launch.main", *RUN, f"run.dir={run_dir}", *arguments]
    words = lab.at_head("salloc", "--nodes=2", "--ntasks-per-node=1", *program)
    return subprocess.run(words, env=lab.env, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_machines_that_reach_each_other_pass(lab: Lab, tmp_path: Path) -> None:
    done = allocated(lab, tmp_path / "run", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    for words in ("the same on 2 machines", "1 machine(s) reach node1 (10.77.0.1:", "over gloo between 2 machines"):
        assert words in told
    assert list(tmp_path.iterdir()) == []


def test_a_job_on_a_network_that_leads_nowhere_starts_nothing(lab: Lab, tmp_path: Path) -> None:
    done = allocated(lab, tmp_path / "run", "cluster.interface=lo")
    assert done.returncode == 1
    assert "node2 to node1 (127.0.0.1:" in done.stdout
    assert "Set cluster.interface" in done.stdout
    assert "Preflight failed: cluster.interface" in done.stderr
    assert list(tmp_path.iterdir()) == []
