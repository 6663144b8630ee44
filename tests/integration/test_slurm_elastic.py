"""Engines in a separate job join a run in another job, and leave it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import read
from scripts.render_slurm import FOLDER
from tests.integration.running import nothing_is_left
from tests.integration.test_slurm import SMALL, TIMEOUT, Submitted
from tests.slurm.lab import Lab, missing, missing_networks

REASON = missing() or missing_networks()
pytestmark = [pytest.mark.campaign, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    try:
        with Lab(folder, ["node1", "node2", "node3"], apart=True) as opened:
            yield opened
    finally:
        shutil.rmtree(folder)


def test_job_of_engines_joins_a_run_loses_a_machine_and_leaves(lab: Lab, tmp_path: Path) -> None:
    """All nodes have their own addresses; nothing is reached over loopback."""
    run_dir = tmp_path / "run"
    job = Submitted(lab, run_dir, *SMALL, "cluster.nodes=1", "cluster.host=null", "run.max_steps=100000")
    job.wait_for_step(3)
    assert read(run_dir).cluster.host is None
    script = tmp_path / "engines.sbatch"
    text = (FOLDER / "engines.sbatch").read_text()
    text = text.replace("exec asyncrl-engines", f"exec {sys.executable} -m asyncrl.launch.engines")
    not_here = ("#SBATCH --gpus-per-node", "#SBATCH --exclusive")
    script.write_text("\n".join(line for line in text.splitlines() if not line.startswith(not_here)) + "\n")
    options = ("--parsable", f"--output={tmp_path}/engines.out", "--nodes=2")
    number = lab.run("sbatch", *options, str(script), str(run_dir)).strip()

    def serving(count: int) -> bool:
        assert job.show()["JobState"] == "RUNNING", job.output
        return job.steps()[-1]["engines/serving"] == count

    def told() -> str:
        return (tmp_path / "engines.out").read_text()

    lab.wait_for(lambda: serving(3), "three engines", TIMEOUT)
    (host,) = {url.split(":")[1] for url in json.loads((run_dir / "addresses.json").read_text())["engines"]}
    assert host == "//10.77.0.1"
    assert "10.77.0.2" in told()
    assert "10.77.0.3" in told()
    lab.kill_node("node3")
    lab.wait_for(lambda: serving(2), "one to be lost", TIMEOUT)
    job.wait_for_step(len(job.steps()) + 5)
    lab.run("scancel", "--signal=USR1", "--batch", number)
    lab.wait_for(lambda: "JobState=COMPLETED" in lab.run("scontrol", "show", "job", number), "end", TIMEOUT)
    lab.wait_for(lambda: serving(1), "the run's own", TIMEOUT)
    lab.run("scancel", job.id)
    job.wait_for_state("CANCELLED")
    nothing_is_left(run_dir)
