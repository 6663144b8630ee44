"""Elastic runs (plan.elastic): the launcher watches what limits the run, and adds or removes engines, or changes
lead or concurrency.

    RUN/elastic.jsonl     every decision, with its reason, its figures, and what was done
    engines that join     by `asyncrl-engines add`, on free GPUs of this machine or as jobs of their own on a cluster
    engines that leave    by the request of `asyncrl-engines remove`; their requests continue elsewhere
    lead, concurrency     by POST /admission of the rollout process

waits for     nothing that takes long, because its caller renews the lease of the run: jobs are submitted
              meanwhile; POST /admission has ANSWER seconds. The next decision waits until the last one has taken effect
              (elastic.py)
on failure    an action that fails is reported in elastic.jsonl, and the run goes on. If the timeline cannot be read, or
              the controller fails, the run goes on without it
"""

from __future__ import annotations

import os
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
from asyncrl.launch.cluster import Cluster, Submission
from asyncrl.launch.leftovers import die_with_parent
from asyncrl.launch.placement import Placement, Seat
from asyncrl.network.addresses import Addresses

if TYPE_CHECKING:
    from asyncrl.extensions.plan.elastic import ElasticDecision
    from asyncrl.extensions.plan.extension import PlanSettings

COMMAND = [sys.executable, "-m", "asyncrl.extensions.join.command"]
ELASTIC = "elastic.jsonl"
"""File in the run folder with the decisions."""
ANSWER = 5.0
"""Deadline of a request to the rollout process."""
SECONDS = 60.0
"""Deadline of the end of the engines that were added."""


class ElasticPilot:
    """Watches one run, and carries out the decisions of its controller."""

    def __init__(
        self,
        config: Config,
        limits: PlanSettings,
        run_dir: Path,
        addresses: Addresses,
        placement: Placement,
        cluster: Cluster,
        command: Sequence[str] = (),
    ) -> None:
        """`command` adds engines instead of asyncrl-engines."""
        from asyncrl.extensions.plan.elastic import ElasticController, ElasticLimits  # imports numpy
        from asyncrl.extensions.plan.observed import RunObserver, setting_of

        engine = config.engine
        self._config, self._run_dir, self._addresses, self._command = config, run_dir, addresses, command or COMMAND
        self._jobs = cluster.engine_jobs(run_dir, addresses.gpus, self._command)
        self._registry, self._added = Registry(run_dir), list[tuple[subprocess.Popen[bytes], list[str]]]()
        self._submissions = list[tuple["ElasticDecision", Submission]]()
        self._gpu = on_gpu(engine, addresses.gpus)
        here = placement.rollout.node
        self._gpus_of = {one[0].url: _gpus(one) for one in placement.engines if one[0].node == here}
        self._free = free_gpus(placement)
        first = setting_of(config)
        whole = config.cluster.gpus if self._jobs and self._gpu else None
        self._unit = max(1, whole // engine.ranks) if whole else 1
        """Number of engines that join at once: in a job, all of a machine."""
        allowed = ElasticLimits(
            limits.min_engines,
            limits.max_engines or first.engines,
            unit=self._unit,
            settle_seconds=engine.start_timeout,
        )
        self._acts = limits.elastic == "act"
        self._controller = ElasticController(first, config.rollout.batch_groups, allowed, acts=self._acts)
        self._observer: RunObserver | None = RunObserver(run_dir, config)
        self._lines: list[str] = []

    def each_poll(self) -> list[str]:
        """Observe the steps since the last call, and act on what is decided. Return the decisions for the console."""
        self._lines.clear()
        try:
            self._record_submissions()
            for seen in self._observer.new() if self._observer else ():
                if decision := self._controller.observe(seen):
                    done = self._act(decision) if self._acts else "advice only (plan.elastic=advise)"
                    if done is not None:
                        self._record(decision, done)
        except (AsyncRLError, OSError, ArithmeticError, LookupError, ValueError) as error:
            reason = str(error) if isinstance(error, AsyncRLError | OSError) else repr(error)
            print(f"asyncrl: plan.elastic has no effect from now on: {reason}", file=sys.stderr, flush=True)
            self._observer = None
        return list(self._lines)

    def _record(self, decision: ElasticDecision, done: str) -> None:
        """Write a decision. If it cannot be written, it is printed, and the run goes on."""
        self._lines.append(f"elastic  step {decision.step}: {decision.reason}; {done}")
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
                case "add_engine" if self._jobs:
                    submission = self._jobs.submit(-(-change // self._unit), decision.step)
                    self._submissions.append((decision, submission))
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
        """Stop submitting jobs, and cancel those that have not started. Wait for the engines that were added here,
        which end with the lease of the run, as those of jobs do. Kill those that have not ended after SECONDS."""
        for decision, submission in self._submissions:
            self._record(decision, submission.cancel())
        self._submissions.clear()
        if self._jobs:
            self._jobs.end()
        deadline = time.monotonic() + SECONDS
        for process, _ in self._added:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()


def free_gpus(placement: Placement) -> list[str]:
    """Return the GPUs of the first machine that no process of the run uses."""
    seats = [*placement.trainers, *(seat for seats in placement.engines for seat in seats)]
    seats += [seat for seats in placement.frozen.values() for seat in seats]
    node = placement.rollout.node
    used = _gpus([seat for seat in seats if seat.node == node])
    return [gpu for gpu in node.gpus if gpu not in used]


def _gpus(seats: Sequence[Seat]) -> list[str]:
    return [seat.node.gpus[place] for seat in seats for place in seat.gpus]
