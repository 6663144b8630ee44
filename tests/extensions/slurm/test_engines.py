"""Jobs of engines that a run submits: without Slurm, whose commands are programs of our own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asyncrl.extensions.slurm import engines
from asyncrl.extensions.slurm.engines import SlurmEngineJobs
from asyncrl.extensions.slurm.extension import SlurmSettings


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch whose program a test writes, beside a squeue that lists no job and a scancel that notes its words."""
    found = tmp_path / "bin" / "sbatch"
    found.parent.mkdir()
    for program, text in (("sbatch", ""), ("squeue", ""), ("scancel", 'echo "$@" > "$0.asked"\n')):
        found.with_name(program).write_text(f"#!/bin/sh\n{text}")
        found.with_name(program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{found.parent}{os.pathsep}{os.environ['PATH']}")
    return found


def jobs(run_dir: Path) -> SlurmEngineJobs:
    return SlurmEngineJobs(SlurmSettings(sbatch={"partition": "gpu"}), run_dir, 8, ["asyncrl-engines"])


def submitted(made: SlurmEngineJobs, count: int = 1) -> str:
    """Return what was done, once it is."""
    submission, deadline = made.submit(count, 7), time.monotonic() + 60
    while (done := submission.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return done


def test_a_job_of_a_whole_machine_is_submitted(tmp_path: Path, sbatch: Path) -> None:
    sbatch.write_text('#!/bin/sh\necho "$@" >> "$0.asked"\necho 77\n')
    made = jobs(tmp_path)
    assert submitted(made) == "submitted job 77"
    script = (tmp_path / "slurm" / "engines.sbatch").read_text()
    assert sbatch.with_name("sbatch.asked").read_text() == f"--parsable {tmp_path}/slurm/engines.sbatch {tmp_path}\n"
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert submitted(made, 2) == "submitted job 77; submitted job 77"
    sbatch.write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    assert "no such partition" in submitted(made)
    sbatch.unlink()
    assert submitted(made).startswith("failed: sbatch: ")


def test_waiting_job_is_not_repeated_and_cancelled_at_the_end(tmp_path: Path, sbatch: Path) -> None:
    squeue, scancel = sbatch.with_name("squeue"), sbatch.with_name("scancel")
    sbatch.write_text('#!/bin/sh\necho x >> "$0.asked"\necho $((76 + $(wc -l < "$0.asked")))\n')
    squeue.write_text("#!/bin/sh\necho 77\necho 9\n")
    made = jobs(tmp_path)
    assert submitted(made) == "submitted job 77"
    assert submitted(made) == "job 77 is still pending"
    assert submitted(made, 2) == "job 77 is still pending; submitted job 78"
    squeue.write_text("#!/bin/sh\n")  # it has started
    assert submitted(made) == "submitted job 79"
    squeue.write_text("#!/bin/sh\necho down >&2\nexit 1\n")
    assert submitted(made) == "failed: squeue: down"
    made.end()
    assert scancel.with_name("scancel.asked").read_text() == "--state=PENDING 77 78 79\n"


def test_sbatch_that_hangs_is_not_waited_for(tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's loop renews the lease of the run, without which all engines end."""
    sbatch.write_text("#!/bin/sh\nexec sleep 60\n")
    submission = jobs(tmp_path).submit(1, 7)
    assert submission.poll() is None
    assert submission.cancel() == "failed: the run has ended"
    monkeypatch.setattr(engines, "SECONDS", 0.2)
    assert submitted(jobs(tmp_path)) == "failed: sbatch did not answer within 0.2 s"
