"""Runs as jobs of a real Slurm on virtual machines (tests/extensions/slurm/lab.py)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.progress import begin_file
from tests.extensions.slurm.lab import JOB, ROOT, SMALL, TIMEOUT, Lab, Submitted, missing, missing_networks, nodes_of
from tests.integration.books import balanced, trained, weights
from tests.integration.running import lines, nothing_is_left, run

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(missing()), reason=missing())]
SHARED = ("slurm.sbatch.exclusive=false", "slurm.sbatch.mem=1000")
GOES_ON = (*SMALL, "checkpoint.every=5", "slurm.requeues=3", "record=true")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Start a Slurm of three nodes."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))  # short: sockets lie in it
    try:
        with Lab(folder, ["node1", "node2", "node3"]) as opened:
            opened.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for patient.py
            yield opened
    finally:
        shutil.rmtree(folder)


def goes_on_exactly(job: Submitted, steps: int, tmp_path: Path) -> None:
    """Check that every step ran once, the ledger balances, and an uninterrupted replay with as many trainers gives the
    same losses and weights, bit for bit."""
    assert [step["version"] for step in job.steps()] == list(range(1, steps + 1))
    balanced(job.run_dir)
    shape = ("trainer.data_parallel=2", f"run.max_steps={steps}")
    again = run(tmp_path / "again", *SMALL, *shape, "mode=replay", f"replay.from={job.run_dir}")
    assert trained(again) == trained(job.steps())
    assert weights(tmp_path / "again") == weights(job.run_dir)
    nothing_is_left(job.run_dir)


@pytest.mark.campaign  # the next test is the same with addresses; test_ends.py holds that a run learns
def test_trainers_on_one_node_and_engines_on_the_other_learn(lab: Lab, tmp_path: Path) -> None:
    job = Submitted(lab, tmp_path / "run", "cluster.nodes=2", "trainer.data_parallel=2", "run.max_steps=100")
    job.wait_for_step(2)
    nodes = job.nodes()
    assert nodes.pop("engine-0") == "node2"
    assert set(nodes.values()) == {"node1"}
    assert {"trainer-0", "trainer-1", "rollout"} <= nodes.keys()
    job.finishes()
    assert rises(job.steps())
    assert "distributed over gloo" in json.loads((tmp_path / "run" / "summary.json").read_text())["transport"]
    nothing_is_left(job.run_dir)


@pytest.mark.skipif(bool(missing_networks()), reason=missing_networks())
def test_nothing_relies_on_loopback_across_nodes(tmp_path: Path) -> None:
    """The nodes are in network namespaces, so 127.0.0.1 differs on each. Addresses are detected; none is configured."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    shape = ("cluster.host=null", "cluster.nodes=2", "trainer.data_parallel=2", "engine.count=2", "run.max_steps=5")
    scale = ("processes.count=2", "trainer.batch_parts=2")  # a process on each node
    try:
        with Lab(folder, apart=True) as apart:
            job = Submitted(apart, tmp_path / "run", *SMALL, *shape, *scale)
            job.finishes()
    finally:
        shutil.rmtree(folder)
    found = json.loads((tmp_path / "run" / "addresses.json").read_text())
    assert {url.split(":")[1] for url in found["engines"]} == {"//10.77.0.2"}
    assert found["router"].startswith("https://10.77.0.1:")
    assert found["extensions"]["processes"]["url"].startswith("https://10.77.0.1:")
    assert {step["processes/playing"] for step in job.steps()} == {2}
    assert [step["version"] for step in job.steps()] == [1, 2, 3, 4, 5]
    assert "distributed over gloo" in json.loads((tmp_path / "run" / "summary.json").read_text())["transport"]
    nothing_is_left(job.run_dir)


def rises(steps: list[dict[str, Any]]) -> bool:
    """Return whether the reward rises."""
    first, last = (sum(step["reward/mean"] for step in part) / 10 for part in (steps[:10], steps[-10:]))
    return last > first + 0.1


def test_job_that_is_out_of_time_goes_on_where_it_was(lab: Lab, tmp_path: Path) -> None:
    """Slurm sends the real signal of a real limit, and really requeues the job.

    The limit is set once the run has started, however long that took. Slurm checks limits every 30 s, and until then
    a step takes two rounds of the agent, 4 s.
    """
    steps, slow = 60, tmp_path / "slow"
    slow.touch()
    limits = ("trainer.data_parallel=2", "slurm.time=30", "cluster.signal_seconds=180", f"run.max_steps={steps}")
    agent = ("agent=tests.integration.patient:answer", f"+agent_params.file={slow}", "rollout.max_running_groups=2")
    job = Submitted(lab, tmp_path / "run", "cluster.nodes=2", *GOES_ON, *limits, *agent)
    job.wait_for_step(5)
    lab.run("scontrol", "update", f"jobid={job.id}", f"timelimit={job.minutes() + 3}")
    job.is_queued_again(1, timelimit=30)
    slow.unlink()
    then = len(job.steps())
    assert 5 <= then < steps
    assert CheckpointStore(job.run_dir).versions()[-1] == then  # not a step is done twice
    assert "ended as requested" in job.output
    job.finishes()
    assert [step["version"] for step in job.steps()] == list(range(1, steps + 1))
    balanced(job.run_dir)
    nothing_is_left(job.run_dir)


def goes_on_without(process: str, lab: Lab, tmp_path: Path) -> Submitted:
    """Kill a process of a job, and return the job after it has done all steps exactly."""
    steps = 14
    shape = ("cluster.nodes=2", "trainer.data_parallel=2", f"run.max_steps={steps}")
    job = Submitted(lab, tmp_path / "run", *GOES_ON, *shape)
    job.wait_for_step(7)
    os.kill(json.loads(begin_file(job.run_dir, process).read_text())["pid"], signal.SIGKILL)
    job.finishes()
    assert json.loads((job.run_dir / "summary.json").read_text())["recoveries"] == 1
    goes_on_exactly(job, steps, tmp_path)
    return job


def test_trainers_of_a_job_start_again_when_one_is_killed(lab: Lab, tmp_path: Path) -> None:
    goes_on_without("trainer-1", lab, tmp_path)


def test_rollout_process_of_a_job_goes_on_when_it_is_killed(lab: Lab, tmp_path: Path) -> None:
    job = goes_on_without("rollout", lab, tmp_path)
    warnings = [line["warning"] for line in lines(job.run_dir / "warnings.jsonl")]
    assert sum(warning.startswith("the rollout process goes on after ") for warning in warnings) == 1


def test_two_jobs_share_nodes_and_one_launcher_is_killed(lab: Lab, tmp_path: Path) -> None:
    """Slurm would keep the launcher's steps until the allocation ends, also in an interactive one."""
    one, shape = tmp_path / "one", ("cluster.nodes=2", *SMALL, *SHARED)
    lab.run("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1000", "--no-shell")
    number = lab.run("squeue", "--noheader", "--format=%i").strip()
    inside = {**lab.env, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node[1-2]"}
    argv = [sys.executable, "-m", "asyncrl.launch.main", *JOB, *shape, f"run.dir={one}", "run.max_steps=1000"]
    (slow := tmp_path / "slow").touch()  # so that the other job is still there
    agent = ("agent=tests.integration.patient:answer", f"+agent_params.file={slow}", "rollout.max_running_groups=2")
    other = Submitted(lab, tmp_path / "other", *shape, *agent, "run.max_steps=30")
    with subprocess.Popen(lab.at_head(*argv), env=inside) as launcher:
        lab.wait_for(lambda: len(lines(one / "metrics.jsonl")) >= 3, "step 3", TIMEOUT)
        other.wait_for_step(3)
        assert set(nodes_of(one).values()) == set(nodes_of(other.run_dir).values()) == {"node1", "node2"}
        slow.unlink()
        launcher.kill()
    nothing_is_left(one)
    lab.run("scancel", number)
    other.finishes()
    nothing_is_left(other.run_dir)


@pytest.mark.campaign
def test_heterogeneous_job_has_rollouts_on_their_machine(lab: Lab, tmp_path: Path) -> None:
    shape = ("cluster.nodes=3", "cluster.cpu_nodes=1", *SMALL)
    job = Submitted(lab, tmp_path / "run", *shape, "run.max_steps=30")
    job.wait_for_step(2)
    assert job.nodes() == {"rollout": "node1", "trainer-0": "node2", "engine-0": "node3"}
    assert "HetJobOffset=1" in lab.run("scontrol", "show", "job", job.id)
    job.finishes()
    nothing_is_left(job.run_dir)


LOST = "engine-1 was lost together with the machine node3; the run continues with 1 engines"


def test_run_goes_on_without_an_engine_whose_node_has_failed(lab: Lab, tmp_path: Path) -> None:
    shape = ("cluster.nodes=3", "cluster.trainer_nodes=1", "engine.count=2", *SMALL)
    job = Submitted(lab, tmp_path / "run", *shape, "run.max_steps=1000")
    job.wait_for_step(3)
    assert job.nodes()["engine-1"] == "node3"
    lab.kill_node("node3")
    lab.wait_for(lambda: LOST in job.output, "loss", TIMEOUT)
    job.wait_for_step(len(job.steps()) + 5)
    assert job.steps()[-1]["engines/serving"] == 1
    lab.run("scancel", job.id)
    job.wait_for_state("CANCELLED")
    nothing_is_left(job.run_dir)
    revive(lab, "node3")


@pytest.mark.campaign
@pytest.mark.parametrize(
    "victim",
    [
        "node1",  # the launcher's own: Slurm only takes the machine out of the job, tasks of the others see to the rest
        "node2",  # a trainer's: the launcher ends, and asks for it
    ],
)
def test_job_goes_on_after_its_trainer_node_failed(lab: Lab, tmp_path: Path, victim: str) -> None:
    steps = 60
    shape = (
        "cluster.nodes=3",
        "cluster.trainer_nodes=2",
        "trainer.data_parallel=2",
        "slurm.lost_timeout=15",
        *GOES_ON,
    )
    job = Submitted(lab, tmp_path / "run", *shape, f"run.max_steps={steps}")
    job.wait_for_step(12)
    assert job.nodes()["trainer-1"] == "node2"
    lab.kill_node(victim)
    lab.wait_for(lambda: lab.states()[victim].startswith("down"), "failure", TIMEOUT)
    revive(lab, victim)
    job.is_queued_again(1)
    job.finishes()
    goes_on_exactly(job, steps, tmp_path)


def revive(lab: Lab, node: str) -> None:
    """Simulate that a machine has power again."""
    lab.start_node(node)
    lab.wait_for(lambda: lab.states()[node] in ("idle", "mix", "alloc"), f"{node} again", TIMEOUT)
    time.sleep(1)
