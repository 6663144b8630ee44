"""Jobs of engines that join a run: the script of one, and their submission by a run.

waits for     nothing: sbatch is started, and looked at later, because the launcher renews the run's lease meanwhile
deadline      SECONDS for each sbatch, and for scancel
on failure    says what failed, and the run goes on
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.extensions.slurm.extension import SlurmSettings
from asyncrl.extensions.slurm.script import as_options
from asyncrl.launch.restarts import LEAVE_SECONDS

SECONDS = 60.0
"""Deadline of each command of Slurm."""

PENDING = ("squeue", "--me", "--states=PENDING", "--noheader", "--format=%i")
"""Command that lists the numbers of this user's jobs that have not started."""


class SlurmSubmission:
    """Jobs that sbatch submits one after the other, without anyone waiting for it. Those that were submitted before and
    have not started are as many fewer to submit."""

    def __init__(self, argv: Sequence[str], count: int, log: Path, earlier: list[str]) -> None:
        """`log` gets the output of the commands. The numbers of jobs are appended to `earlier`."""
        self._argv, self._left, self._log, self._done = argv, count, log, list[str]()
        self._jobs, self._asks = earlier, bool(earlier)
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0

    def poll(self) -> str | None:
        """Return what was done once all are submitted, or one has failed; None before."""
        while self._left:
            if self._process is None:
                self._start()
            elif self._process.poll() is None and time.monotonic() < self._deadline:
                return None
            else:
                self._end(self._process)
        return "; ".join(self._done)

    def cancel(self) -> str:
        """Stop submitting. Return what was done."""
        if self._process:
            self._process.kill()
            self._process.wait()
        self._fail("the run has ended")
        return "; ".join(self._done)

    def _start(self) -> None:
        self._deadline = time.monotonic() + SECONDS
        try:
            with self._log.open("wb") as out:
                self._process = subprocess.Popen(
                    PENDING if self._asks else self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            self._fail(f"{'squeue' if self._asks else 'sbatch'}: {error}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process, asked, self._asks = None, self._asks, False
        command = "squeue" if asked else "sbatch"
        if process.poll() is None:
            process.kill()
            process.wait()
            self._fail(f"{command} did not answer within {SECONDS:g} s")
            return
        answer = self._log.read_text(errors="replace").strip()
        if process.returncode:
            self._fail(f"squeue: {answer}" if asked else f"sbatch rejected {self._argv[-2]}: {answer}")
        elif asked:
            pending = [job for job in self._jobs if job in answer.split()]
            self._left = max(0, self._left - len(pending))
            self._done += [f"job {job} is still pending" for job in pending]
        else:
            self._left -= 1
            self._jobs.append(answer.partition(";")[0])  # a cluster's name may follow
            self._done.append(f"submitted job {answer}")

    def _fail(self, reason: str) -> None:
        self._left = 0
        self._done.append(f"failed: {reason}")


class SlurmEngineJobs:
    """Jobs of engines for one run, of a machine each."""

    def __init__(self, settings: SlurmSettings, run_dir: Path, gpus: int, command: Sequence[str]) -> None:
        """`gpus` is their number on each machine; `command` is asyncrl-engines."""
        self._settings, self._run_dir, self._gpus, self._command = settings, run_dir, gpus, command
        self._jobs = list[str]()

    def submit(self, count: int, step: int) -> SlurmSubmission:
        """Submit jobs. The output of sbatch is in slurm/sbatch-STEP.log of the run folder."""
        script = self._run_dir / "slurm" / "engines.sbatch"
        output = str(script.with_name("%x-%j.out"))
        script.parent.mkdir(exist_ok=True)
        script.write_text(engines_script(self._settings, self._gpus, shlex.join(self._command), output))
        argv = ["sbatch", "--parsable", str(script), str(self._run_dir)]
        return SlurmSubmission(argv, count, script.with_name(f"sbatch-{step}.log"), self._jobs)

    def end(self) -> None:
        """Cancel the jobs that have not started: a later run in this folder is not theirs."""
        if not self._jobs:
            return
        try:
            subprocess.run(["scancel", "--state=PENDING", *self._jobs], timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"asyncrl: jobs that have not started may remain: scancel: {error}", file=sys.stderr, flush=True)


def engines_script(slurm: SlurmSettings, gpus: int, command: str, output: str = "%x-%j.out") -> str:
    """Return the script of a job of engines on one machine that joins a run, whose folder is its argument."""
    derived = {"job-name": "engines", "no-kill": True, "nodes": 1, "ntasks-per-node": 1}
    derived |= {"gpus-per-node": gpus} if gpus else {}
    derived |= {"output": output, "signal": f"B:USR1@{LEAVE_SECONDS:.0f}"}
    given = {name.replace("_", "-"): value for name, value in slurm.sbatch.items()}
    lines = ["#!/bin/bash", "# Engines for a run that is under way: sbatch engines.sbatch RUN (docs/rollouts.md)"]
    lines += [*as_options({**derived, **given}), "", *slurm.setup, f'exec {command} add "$1"', ""]
    return "\n".join(lines)
