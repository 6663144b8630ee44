"""The restart policy: which processes are restarted when they die, and what must happen first.

An engine that dies loses its weights, but the router may still know its address and would send it requests as soon as
it answers again. The router is therefore told to forget it first. Then the trainer finds the restarted engine
(Fleet.reconcile), sends it all weights, and registers it with the router. An engine that the trainer has given up (it
hangs, or holds wrong weights) is killed and restarted in the same way. So is an engine or a router that is alive but
does not answer (launch/watch.py), whatever the trainer is doing. A process that only plays episodes is restarted
alone, also after a stall (launch/stalls.py). A restarted router learns from the trainer which engines serve.

When a trainer dies, all of them are killed and started again (trainer/recovery.py), except for an error that would only
happen again: one of the user's code or of this system, a third death at the same step, or a fourth within ten steps.
Where they were out of memory they go on with smaller micro-batches, and then with recomputation. The rollout process is
started again under the same rule, and goes on from its last state (rollout/journal.py).

An engine may be asked to leave (asyncrl-engines remove). It is stopped once the trainer has released it, and not
restarted.

In a job a machine may fail. A process that could not be started there is retried until the cluster has removed the
machine from the job. An engine that was there is then lost, and the run continues with the others.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.engine.registry import Registry
from asyncrl.engine.router import RouterWorkers
from asyncrl.errors import EngineError
from asyncrl.jsonl import Tail
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.watch import HealthWatch
from asyncrl.network.addresses import (
    LOST,
    OUT_OF_MEMORY,
    READY,
    RESTARTED,
    TRAINING,
    Addresses,
    times_out_of_memory,
)
from asyncrl.progress import FAILURE, FOLDER, begin_file, end_file, failures

FORGET_SECONDS = 5.0
"""Timeout of the router's response when it is told to forget a dead engine."""
RETRY_SECONDS = 10.0
"""Seconds between two attempts to start a process on a machine that does not answer."""
RECOVERIES, RECOVERY_STEPS = 3, 10
"""The trainers, and the rollout process, are started again at most so often within so many steps."""
OUT_OF_MEMORY_TIMES = 4
"""Recoveries of a run, with its resumes, from being out of memory: the last ones with other settings
(trainer/recovery.py)."""
LOOK_SECONDS = 1.0
"""Seconds between two checks for engines that are asked to leave: the folder may be on a widely shared file system."""
LEAVE_SECONDS = 600.0
"""Maximum seconds that a leaving engine waits for the trainer, which may be in the middle of a long step."""

Restarted = Callable[[str, str, float], None]
"""Takes the name of a process that is started again, how it died, and when (time.time)."""


class RestartPolicy:
    """The restarts of one run. `forget` makes the router forget an engine, or raises EngineError; `watches` are by
    process name; `has_machine` tells whether a machine still belongs to the job. `newcomers` is a word unique to this
    launcher if its engines join a run in progress, and need its weights from the start. `restarted` is called with the
    name of every process that is started again, how it died, and when."""

    def __init__(
        self,
        run_dir: Path,
        forget: Callable[[str], None] = lambda url: None,
        watches: Mapping[str, HealthWatch] | None = None,
        has_machine: Callable[[str], bool] = lambda node: True,
        newcomers: str = "",
        leave_seconds: float = LEAVE_SECONDS,
        restarted: Restarted = lambda name, how, died: None,
    ) -> None:
        self._run_dir, self._forget = run_dir, forget
        self._has_machine = has_machine
        self._watches = watches or {}
        self._tried: dict[str, float] = {}
        self._restarts: Counter[str] = Counter()
        self._announced: dict[str, float] = {}  # deaths that were reported, and when
        self._died = defaultdict[str, float](float)
        self._restarted = restarted
        self._notes = Tail(run_dir / LOST, new=bool(newcomers))
        self._registry, self._newcomers, self._leave_seconds = Registry(run_dir), newcomers, leave_seconds
        self._asked_at: dict[str, float] = {}
        self._recoveries = defaultdict[str, list[tuple[int, str]]](list)  # by kind: the newest step, who died and how
        self._looked_at = -LOOK_SECONDS

    def count(self, name: str) -> int:
        """Return how often a process was restarted."""
        return self._restarts[name]

    def allows(self, spec: ProcessSpec) -> bool:
        """Return whether the process may be restarted once more. A process that dies before all were up is faulty
        itself."""
        allowed = self._restarts[spec.name] < spec.restarts and (self._run_dir / READY).exists()
        return allowed and (not spec.recovers or self._may_recover(spec))

    def _may_recover(self, spec: ProcessSpec) -> bool:
        earlier = self._recoveries[spec.kind]
        if self._restarts[spec.name] < len(earlier):
            return True  # it died of a death that the trainers recover from already
        failed = self._failures(spec)
        if any(failure["lasting"] for failure in failed):
            return False
        if _out_of_memory(spec, failed):
            return times_out_of_memory(self._run_dir) < OUT_OF_MEMORY_TIMES
        step = self._newest_step()
        before = [died for died, _ in earlier]
        return before.count(step) < 2 and sum(step - died < RECOVERY_STEPS for died in before) < RECOVERIES

    def _recover(self, spec: ProcessSpec, how: str) -> None:
        """Record a death of the trainers or of the rollout process, and forget their errors, which must not be taken
        for those of the next."""
        self._recoveries[spec.kind].append((self._newest_step(), f"{spec.name}, {how}"))
        failed = self._failures(spec)
        if _out_of_memory(spec, failed):
            (self._run_dir / OUT_OF_MEMORY).write_text(str(times_out_of_memory(self._run_dir) + 1))
        for failure in failed:
            (self._run_dir / FOLDER / f"{failure['process']}{FAILURE}").unlink()

    def _failures(self, spec: ProcessSpec) -> list[dict[str, Any]]:
        return [one for one in failures(self._run_dir) if one["process"].partition("-")[0] == spec.kind]

    def recoveries(self) -> list[str]:
        """Return a line for each death of the trainers and of the rollout process that was followed by a recovery."""
        deaths = chain(*self._recoveries.values())
        return [f"had recovered after step {step}: {how}" for step, how in deaths]

    def _newest_step(self) -> int:
        return max((int(line["version"]) for line in Tail(self._run_dir / "metrics.jsonl")()), default=0)

    def lost(self, spec: ProcessSpec) -> bool:
        """Return whether the machine of a dead process has left the job. Asks the cluster, and does so rarely."""
        if not (spec.step and spec.restarts) or self._began(spec.name) or not self._due(spec.name):
            return False
        return not self._has_machine(spec.node)

    def _began(self, name: str) -> bool:
        """Return whether the process itself had started when its step ended."""
        return any(self._written(begin_file, name))

    def _written(self, of: Callable[[Path, str], Path], name: str) -> list[Path]:
        """Return the notes of a process, or of the ranks of a step."""
        file = of(self._run_dir, name)
        return [one for one in (file, *file.parent.glob(f"{name}-[0-9]*{file.suffix}")) if one.exists()]

    def _due(self, name: str) -> bool:
        return time.monotonic() - self._tried.get(name, -RETRY_SECONDS) >= RETRY_SECONDS

    def may_start_now(self, spec: ProcessSpec, how: str) -> bool:
        """Report a death once. Return whether the process may be restarted now, and count the restart; if not, ask
        again later."""
        if spec.name not in self._announced:
            self._announced[spec.name] = time.time()
            print(f"asyncrl: {spec.name} died ({how}); restarting it", file=sys.stderr, flush=True)
        if spec.shares and (self._run_dir / TRAINING).exists():
            return False  # the trainers use its GPU
        try:
            if spec.url:
                self._forget(spec.url)
        except EngineError:  # the router is dead as well, and a new one knows no engines
            return False
        if spec.step:
            if not self._due(spec.name):
                return False
            self._tried[spec.name] = time.monotonic()
        self._died[spec.name] = self._announced.pop(spec.name)
        self._restarted(spec.name, how, self._died[spec.name])
        if not spec.step or self._began(spec.name):  # otherwise nothing has died: its machine does not answer
            if spec.recovers:
                if self._restarts[spec.name] == len(self._recoveries[spec.kind]):
                    self._recover(spec, how)
                # also of a rank that comes behind a second death of another: all must have been started as often
                self._restarts[spec.name] = len(self._recoveries[spec.kind])
            else:
                self._restarts[spec.name] += 1
        for note in (*self._written(begin_file, spec.name), *self._written(end_file, spec.name)):
            note.unlink(missing_ok=True)
        if spec.name in self._watches:
            self._watches[spec.name].forget()
        return True

    def given_up(self, specs: Iterable[ProcessSpec]) -> list[str]:
        """Return the engines that the trainer has given up since the last call, and that have not been restarted
        since."""
        by_url = {spec.url: spec for spec in specs if spec.url}
        found = []
        for note in self._notes():
            spec = by_url.get(note["engine"])
            if spec and self.allows(spec) and note["incarnation"] == self.incarnation(spec.name):
                found.append(spec.name)
        return found

    def hanging(self) -> list[str]:
        """Return the processes found to hang since the last call; none while the run is starting."""
        if not (self._run_dir / READY).exists():
            return []
        found = [name for name, watch in self._watches.items() if watch.hangs()]
        for name in found:
            self._watches[name].forget()
            print(f"asyncrl: {name} is running but does not answer; killing it", file=sys.stderr, flush=True)
        return found

    def incarnation(self, name: str) -> str:
        """Return the incarnation that the process is told; "" for the first one."""
        restarts = self._restarts[name]
        return f"{RESTARTED}{self._newcomers}{restarts}" if restarts or self._newcomers else ""

    def died_at(self, name: str) -> float:
        """Return when the process died last, in seconds since the epoch; 0 if it has not."""
        return self._died[name]

    def leaves(self, spec: ProcessSpec) -> bool:
        """Return whether it is asked to leave."""
        return spec.name in self._asked_at

    def may_stop(self, specs: Iterable[ProcessSpec]) -> list[str]:
        """Return the engines that are asked to leave and that the trainer has released, or has not released in time."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return []
        leaving, self._looked_at, found = self._registry.leaving(), now, []
        for spec in specs:
            if spec.url in leaving:
                if spec.name not in self._asked_at:
                    print(f"asyncrl: {spec.name} was asked to leave", file=sys.stderr, flush=True)
                waited = now - self._asked_at.setdefault(spec.name, now)
                if self._registry.has_left(spec.url) or waited > self._leave_seconds:
                    found.append(spec.name)
        return found

    def stopped(self, spec: ProcessSpec) -> None:
        """Record that an engine has left."""
        self._registry.stopped(spec.url)


def _out_of_memory(spec: ProcessSpec, failed: Iterable[dict[str, Any]]) -> bool:
    """Return whether these failures are those of trainers that were out of memory."""
    return spec.ends_the_run and any(failure["memory"] for failure in failed)


def restart_policy(
    run_dir: Path,
    addresses: Addresses,
    specs: Iterable[ProcessSpec],
    has_machine: Callable[[str], bool],
    newcomers: str = "",
    *,
    restarted: Restarted = lambda name, how, died: None,
) -> RestartPolicy:
    """Return the restart policy of these processes, with the router and the watches of a run that is about to start."""

    def forget(url: str) -> None:  # creates its HTTP client late, so that a run need not wait for it to start
        RouterWorkers(addresses.router, addresses.access, FORGET_SECONDS).remove(url)

    watches = {spec.name: HealthWatch(spec.watch, addresses.access, spec.patience) for spec in specs if spec.watch}
    return RestartPolicy(run_dir, forget, watches, has_machine, newcomers, restarted=restarted)
