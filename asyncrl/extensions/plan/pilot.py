"""Elastic runs (cluster.elastic): the launcher watches what limits the run, and adds or removes engines, or changes
lead or concurrency.

    RUN/elastic.jsonl     every decision, with its reason, its figures, and what was done
    engines that join     by `asyncrl-engines add`, on free GPUs of this machine or as a job of its own under Slurm
    engines that leave    by the request of `asyncrl-engines remove`; their requests continue elsewhere
    lead, concurrency     by POST /admission of the rollout process

waits for     nothing that takes long, because its caller renews the lease of the run: sbatch is started, and asked for
              later; POST /admission has ANSWER seconds. The next decision waits until the last one has taken effect
              (elastic.py)
on failure    an action that fails is reported in elastic.jsonl, and the run goes on. If the timeline cannot be read, or
              the controller fails, the run goes on without it
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import jsonl
from asyncrl.config import Config, on_gpu
from asyncrl.engine.registry import Registry
from asyncrl.errors import AsyncRLError, LaunchError
from asyncrl.launch.leftovers import die_with_parent
from asyncrl.launch.placement import Placement, Seat
from asyncrl.network.addresses import ELASTIC, Addresses

if TYPE_CHECKING:
    from asyncrl.extensions.plan.elastic import ElasticDecision

COMMAND = [sys.executable, "-m", "asyncrl.launch.engines"]
ANSWER = 5.0
"""Deadline of a request to the rollout process."""
SECONDS = 60.0
"""Deadline of each sbatch, and of the end of the engines that were added."""
PENDING = ("squeue", "--me", "--states=PENDING", "--noheader", "--format=%i")
"""Command that lists the numbers of this user's jobs that have not started."""


class Submission:
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


class ElasticPilot:
    """Watches one run, and carries out the decisions of its controller."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        addresses: Addresses,
        placement: Placement,
        command: Sequence[str] = (),
    ) -> None:
        """`command` adds engines instead of asyncrl-engines."""
        from asyncrl.extensions.plan.elastic import ElasticController, ElasticLimits  # imports numpy
        from asyncrl.extensions.plan.observed import RunObserver, setting_of

        cluster, engine = config.cluster, config.engine
        self._config, self._run_dir, self._addresses, self._command = config, run_dir, addresses, command or COMMAND
        self._registry, self._added = Registry(run_dir), list[tuple[subprocess.Popen[bytes], list[str]]]()
        self._submissions, self._jobs = list[tuple["ElasticDecision", Submission]](), list[str]()
        self._gpu = on_gpu(engine, addresses.gpus)
        here = placement.rollout.node
        self._gpus_of = {one[0].url: _gpus(one) for one in placement.engines if one[0].node == here}
        self._free = free_gpus(placement)
        first = setting_of(config)
        self._unit = _unit(config, gpu=self._gpu)
        limits = ElasticLimits(
            cluster.min_engines,
            cluster.max_engines or first.engines,
            unit=self._unit,
            settle_seconds=engine.start_timeout,
        )
        self._acts = cluster.elastic == "act"
        self._controller = ElasticController(first, config.rollout.batch_groups, limits, acts=self._acts)
        self._observer: RunObserver | None = RunObserver(run_dir, config)

    def each_poll(self) -> None:
        """Observe the steps since the last call, and act on what is decided."""
        try:
            self._record_submissions()
            for seen in self._observer.new() if self._observer else ():
                if decision := self._controller.observe(seen):
                    done = self._act(decision) if self._acts else "advice only (cluster.elastic=advise)"
                    if done is not None:
                        self._record(decision, done)
        except (AsyncRLError, OSError, ArithmeticError, LookupError, ValueError) as error:
            reason = str(error) if isinstance(error, AsyncRLError | OSError) else repr(error)
            print(f"asyncrl: cluster.elastic has no effect from now on: {reason}", file=sys.stderr, flush=True)
            self._observer = None

    def _record(self, decision: ElasticDecision, done: str) -> None:
        """Write a decision. If it cannot be written, it is printed, and the run goes on."""
        try:
            jsonl.append(self._run_dir / ELASTIC, {**asdict(decision), "reason": decision.reason, "done": done})
        except OSError as error:
            line = f"asyncrl: cannot write {ELASTIC} ({error}): {decision.reason}; {done}"
            print(line, file=sys.stderr, flush=True)

    def _act(self, decision: ElasticDecision) -> str | None:
        """Carry out a decision. Return what was done, or why it was not; None if that is recorded later."""
        change = round(abs(decision.after - decision.before))
        try:
            match decision.action:
                case "add_engine" if self._config.cluster.launcher == "slurm":
                    self._submissions.append((decision, self._submission(-(-change // self._unit), decision.step)))
                    return None
                case "add_engine":
                    return self._add_engines(change)
                case "remove_engine":
                    return self._remove(change)
                case "raise_lead" | "lower_lead":
                    return self._admission(lead=round(decision.after))
                case _:
                    groups = max(1, round(decision.after / self._config.rollout.group_size))
                    return self._admission(max_running_groups=groups)
        except (AsyncRLError, OSError) as error:
            return f"failed: {error}"

    # -- engines -------------------------------------------------------------------------------------------

    def _add_engines(self, count: int) -> str:
        """Start engines, until one cannot be started."""
        done = list[str]()
        try:
            for _ in range(count):
                done.append(self._add())
        except (AsyncRLError, OSError) as error:
            done.append(f"failed: {error}")
        return "; ".join(done)

    def _add(self) -> str:
        """Start an engine."""
        used = {gpu for process, gpus in self._added if process.poll() is None for gpu in gpus}
        gone = [url for url in self._gpus_of if self._registry.has_left(url) and url not in self._registry.leaving()]
        free = [*self._free, *(gpu for url in gone for gpu in self._gpus_of[url])]
        free = [gpu for gpu in free if gpu not in used]
        wanted = self._config.engine.ranks if self._gpu else 0
        if len(free) < wanted:
            raise LaunchError(f"an engine takes {wanted} GPUs, and {len(free)} of this machine are free")
        mine = free[:wanted]
        log = self._run_dir / "logs" / f"elastic-{len(self._added)}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self._command, "add", str(self._run_dir), "--count", "1"],
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(mine)} if wanted else {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._added.append((process, mine))
        return f"started an engine ({log})"

    def _submission(self, jobs: int, step: int) -> Submission:
        """Submit jobs of engines, as many in each as fit a machine."""
        from asyncrl.launch.slurm.script import engines_script

        script = self._run_dir / "slurm" / "engines.sbatch"
        cluster = self._config.cluster
        output = str(script.with_name("%x-%j.out"))
        script.write_text(engines_script(cluster, self._addresses.gpus, shlex.join(self._command), output))
        argv = ["sbatch", "--parsable", str(script), str(self._run_dir)]
        return Submission(argv, jobs, script.with_name(f"sbatch-{step}.log"), self._jobs)

    def _record_submissions(self) -> None:
        """Record the decisions whose jobs are submitted by now."""
        for decision, submission in list(self._submissions):
            if (done := submission.poll()) is not None:
                self._submissions.remove((decision, submission))
                self._record(decision, done)

    def _remove(self, count: int) -> str:
        """Ask engines to leave, those that have joined first; of these, all of one machine before others."""
        leaving, joined = self._registry.leaving(), self._registry.joined()
        guests = sorted(joined, key=lambda url: (str(joined[url]["host"]), url), reverse=True)
        own = [url for url in reversed(self._addresses.engines) if not self._registry.has_left(url)]
        asked = [url for url in (*guests, *own) if url not in leaving][:count]
        for url in asked:
            self._registry.ask_to_leave(url)
        return f"asked to leave: {', '.join(asked)}"

    def _admission(self, **changes: int) -> str:
        """Change lead or concurrency in the rollout process."""
        import httpx

        try:
            url, http = f"{self._addresses.rollout}/admission", self._addresses.access.http
            httpx.post(url, json=changes, timeout=ANSWER, **http).raise_for_status()
        except httpx.HTTPError as error:
            raise LaunchError(f"{url}: {error}") from None
        return ", ".join(f"rollout.{name}={value}" for name, value in changes.items())

    def end(self) -> None:
        """Stop submitting jobs, and cancel those that have not started: a later run in this folder is not theirs. Wait
        for the engines that were added here, which end with the lease of the run, as Slurm's jobs do. Kill those that
        have not ended after SECONDS."""
        for decision, submission in self._submissions:
            self._record(decision, submission.cancel())
        self._submissions.clear()
        if self._jobs:
            try:
                subprocess.run(["scancel", "--state=PENDING", *self._jobs], timeout=SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"asyncrl: jobs that have not started may remain: scancel: {error}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + SECONDS
        for process, _ in self._added:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


def _unit(config: Config, *, gpu: bool) -> int:
    """Return the number of engines that join at once: under Slurm, all of a machine."""
    whole = config.cluster.launcher == "slurm" and gpu and config.cluster.gpus
    return max(1, whole // config.engine.ranks) if whole else 1


def free_gpus(placement: Placement) -> list[str]:
    """Return the GPUs of the first machine that no process of the run uses."""
    seats = [*placement.trainers, *(seat for seats in placement.engines for seat in seats)]
    seats += [*placement.teachers, *placement.judges]
    node = placement.rollout.node
    used = _gpus([seat for seat in seats if seat.node == node])
    return [gpu for gpu in node.gpus if gpu not in used]


def _gpus(seats: Sequence[Seat]) -> list[str]:
    return [seat.node.gpus[place] for seat in seats for place in seat.gpus]
