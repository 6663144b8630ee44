"""Engines in a separate job join a run in another job, and leave it: submitted by hand, and by the run itself."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.config import read
from scripts.render_slurm import FOLDER
from tests.extensions.slurm.lab import SMALL, TIMEOUT, Lab, Submitted, missing, missing_networks
from tests.integration.running import lines, nothing_is_left

REASON = missing() or missing_networks()
pytestmark = [pytest.mark.campaign, pytest.mark.skipif(bool(REASON), reason=REASON)]


ONE_MACHINE = (*SMALL, "cluster.nodes=1", "cluster.host=null", "run.max_steps=100000")
ELASTIC = (
    *("plan.elastic=act", "plan.max_engines=3", "timelines.record=true", "slurm.sbatch.exclusive=true"),
    *("engine.max_running_requests=1", "rollout.max_staleness=1"),  # an engine is too slow
)


@contextmanager
def opened(*nodes: str) -> Iterator[Lab]:
    """Start a Slurm whose nodes have their own addresses, so that nothing is reached over loopback."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    try:
        with Lab(folder, nodes, apart=True) as lab:
            yield lab
    finally:
        shutil.rmtree(folder)


def test_run_submits_engine_jobs_and_leaves_none_behind(tmp_path: Path) -> None:
    """The run has one of two nodes. Its first job of engines gets the other, and its second one waits."""
    run_dir = tmp_path / "run"
    with opened("node1", "node2") as lab:
        job = Submitted(lab, run_dir, *ONE_MACHINE, *ELASTIC)

        def submitted() -> list[str]:
            assert job.show()["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), job.output
            decisions = lines(run_dir / "elastic.jsonl")
            assert {one["action"] for one in decisions} <= {"add_engine"}
            return [one["done"].removeprefix("submitted job ") for one in decisions]

        def state(number: str) -> str:
            return lab.run("scontrol", "show", "job", number).partition("JobState=")[2].split()[0]

        lab.wait_for(lambda: len(submitted()) == 1, "a submitted job", TIMEOUT)
        (engines,) = submitted()
        lab.wait_for(lambda: state(engines) == "RUNNING", "the start of its engine", TIMEOUT)
        lab.wait_for(lambda: job.steps()[-1]["engines/serving"] == 2, "the engine to join", TIMEOUT)
        told = (run_dir / "slurm" / f"engines-{engines}.out").read_text()
        assert "10.77.0.2" in told
        lab.wait_for(lambda: len(submitted()) == 2, "another submitted job", TIMEOUT)
        waiting = submitted()[1]
        assert state(waiting) == "PENDING"
        assert state(engines) == "RUNNING"
        (own,) = json.loads((run_dir / "addresses.json").read_text())["engines"]
        lab.run(sys.executable, "-m", "asyncrl.extensions.join.command", "remove", str(run_dir), own, timeout=TIMEOUT)
        job.wait_for_step(len(job.steps()) + 5)  # with the other alone
        assert job.steps()[-1]["engines/serving"] == 1
        lab.run("scancel", "--signal=USR1", "--batch", job.id)  # the run ends with a checkpoint
        lab.wait_for(lambda: state(job.id) == "FAILED", f"the end of {job.output}", TIMEOUT)
        lab.wait_for(lambda: state(engines) == "COMPLETED", "the end of its engine", TIMEOUT)
        assert state(waiting) == "CANCELLED"
        assert not lab.run("squeue", "--noheader")
    nothing_is_left(run_dir)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with opened("node1", "node2", "node3") as three:
        yield three


def test_job_of_engines_joins_a_run_loses_a_machine_and_leaves(lab: Lab, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = Submitted(lab, run_dir, *ONE_MACHINE)
    job.wait_for_step(3)
    assert read(run_dir).cluster.host is None
    script = tmp_path / "engines.sbatch"
    text = (FOLDER / "engines.sbatch").read_text()
    text = text.replace("exec asyncrl-engines", f"exec {sys.executable} -m asyncrl.extensions.join.command")
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
