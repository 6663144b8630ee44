"""Faults at random moments of a run, drawn from a seed, and their injection into its processes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from asyncrl.network.addresses import Addresses
from tests.integration.running import TIMEOUT, descendants, output, processes_of

KILLED, STOPPED, ROUTER_KILLED, ROUTER_STOPPED, CUT = (
    "engine killed",
    "engine stopped",
    "router killed",
    "router stopped",
    "streams reset",
)


@dataclass(frozen=True)
class Fault:
    """Fault to inject at a given time."""

    kind: str
    version: int  # once it is published
    delay: float  # seconds after that
    engines: tuple[int, ...] = ()
    seconds: float = 0.0  # that it stays stopped, unless it is killed for it
    requests: int = 0  # whose streams are reset,
    tokens: int = 0  # each after so many


def draw(
    choose: random.Random, kinds: Sequence[str], count: int, *, engines: int, versions: int, stopped: Sequence[float]
) -> list[Fault]:
    """Draw this many faults, in order of time. No process stays stopped longer than the last value of `stopped`."""
    faults = []
    for _ in range(count):
        kind = choose.choice(kinds)
        hit = choose.sample(range(engines), engines if choose.random() < 0.2 else 1)
        faults.append(
            Fault(
                kind,
                choose.randint(1, versions),
                choose.uniform(0.0, 0.5),
                tuple(sorted(hit)) if kind in (KILLED, STOPPED, CUT) else (),
                choose.uniform(*stopped) if kind in (STOPPED, ROUTER_STOPPED) else 0.0,
                choose.randint(1, 8) if kind == CUT else 0,
                choose.randint(0, 40) if kind == CUT else 0,
            )
        )
    return sorted(faults, key=lambda fault: (fault.version, fault.delay))


class Injector:
    """Injector of faults into a run. Stopped processes continue when its context is left."""

    def __init__(self, launcher: subprocess.Popen[str], run_dir: Path) -> None:
        self._launcher, self._run_dir = launcher, run_dir
        self._timers: list[threading.Timer] = []
        self.done: Counter[str] = Counter()
        self.seen: set[psutil.Process] = set()
        """Processes of the run that were seen around each fault."""

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.function(*timer.args)

    def inject(self, faults: Sequence[Fault]) -> None:
        """Inject all faults at their times, except those after the end of the run."""
        for fault in faults:
            self._wait_for(fault.version)
            time.sleep(fault.delay)
            for name in [f"engine-{number}" for number in fault.engines] or ["router"]:
                self.done[fault.kind] += self._cut(fault, name) if fault.kind == CUT else self._hit(fault, name)
            self._look()

    def _wait_for(self, version: int) -> None:
        file, deadline = self._run_dir / "ledger.json", time.monotonic() + TIMEOUT
        while not file.exists() or json.loads(file.read_text())["version"] < version:
            said = output(self._run_dir)[-5000:]
            assert self._launcher.poll() is None, f"the run ended before version {version}:\n{said}"
            assert time.monotonic() < deadline, f"no version {version} within {TIMEOUT} s:\n{said}"
            time.sleep(0.02)
        self._look()

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.seen |= set(descendants(self._launcher))

    def _cut(self, fault: Fault, name: str) -> bool:
        url = Addresses.read(self._run_dir).engines[int(name.removeprefix("engine-"))]
        body = {"requests": fault.requests, "tokens": fault.tokens}
        try:
            httpx.post(f"{url}/cut", json=body, timeout=2.0, trust_env=False)
        except httpx.TransportError:  # it is dead, or stopped
            return False
        return True

    def _hit(self, fault: Fault, name: str) -> bool:
        members = self._members(name)
        _signal(members, signal.SIGKILL if fault.kind in (KILLED, ROUTER_KILLED) else signal.SIGSTOP)
        if fault.seconds:
            self._timers.append(threading.Timer(fault.seconds, _signal, [members, signal.SIGCONT]))
            self._timers[-1].start()
        return bool(members)

    def _members(self, name: str) -> list[psutil.Process]:
        """Return the processes of a name, after its restart if it is dead; none if the run has ended."""
        deadline = time.monotonic() + TIMEOUT
        while self._launcher.poll() is None:
            with suppress(psutil.NoSuchProcess, KeyError):
                leader = psutil.Process(processes_of(self._launcher, self._run_dir)[name])
                return [leader, *leader.children(recursive=True)]
            assert time.monotonic() < deadline, f"{name} was not started again within {TIMEOUT} s"
            time.sleep(0.05)
        return []


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # psutil knows a process from another with its number
            process.send_signal(number)
