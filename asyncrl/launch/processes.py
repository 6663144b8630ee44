"""The supervisor: owns every process of a run on this machine.

waits for     a death, or a signal to stop
on death      once the run is under way an engine or the router is started again (launch/restarts.py); any other process
              that ends otherwise than a finished trainer ends the run: who, how, its last lines
always        every process is stopped, in reverse order of need, and what outlives its parent is swept up by the
              run's id in its environment; nothing is left behind, not even after SIGKILL of the launcher (each child
              asks the kernel to be killed when its parent dies)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import ProcessDied
from asyncrl.launch.leftovers import shared_files, sweep
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.restarts import RestartPolicy

POLL_SECONDS = 0.1
LAST_LINES = 20
COMPANION_SECONDS = 1.0  # a death drags others along: wait this long to tell the first from the rest
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Stopped(Exception):
    """SIGINT or SIGTERM reached the launcher."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Supervisor:
    """Starts the specifications, watches them, and leaves nothing behind."""

    def __init__(
        self, specs: list[ProcessSpec], run_dir: Path, run_id: str, grace: float, policy: RestartPolicy | None = None
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir, self._run_id, self._grace = run_dir, run_id, grace
        self._policy = policy or RestartPolicy(run_dir)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, each_poll: Callable[[], None]) -> None:
        """Until the trainers have finished. Raises ProcessDied or Stopped; processes are gone in every case."""
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in self._specs:
                self._start(name)
            while not self._finished():
                each_poll()
                time.sleep(POLL_SECONDS)
            each_poll()
        finally:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)  # stopping must not be interrupted half-way
            self._stop_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, name: str, restarts: int = 0) -> None:
        spec = self._specs[name]
        # to a file, not a pipe: children of children may hold it for long
        with self._log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env, "ASYNCRL_RESTARTS": str(restarts)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _finished(self) -> bool:
        """Whether all trainers ended well. Raises ProcessDied at the first other end that is no engine's."""
        for name in [*self._policy.given_up(self._specs.values()), *self._policy.hanging()]:
            _signal_group(self._children[name].pid, signal.SIGKILL)
        dead = {name: code for name, child in self._children.items() if (code := child.poll()) is not None}
        ends = {name for name, spec in self._specs.items() if spec.ends_the_run}
        wrong = {name: code for name, code in dead.items() if code != 0 or name not in ends}
        final = {name: code for name, code in wrong.items() if not self._policy.allows(self._specs[name])}
        if final:
            raise ProcessDied(self._diagnosis(final))
        if ends <= dead.keys():
            return True
        for name, code in wrong.items():
            _signal_group(self._children[name].pid, signal.SIGKILL)  # what is left of its group
            if self._policy.may_start_now(self._specs[name], f"{how(code)}; see {self._log(name)}"):
                self._start(name, self._policy.count(name))
        return False

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _diagnosis(self, first: dict[str, int]) -> str:
        """The first to die, killed ones before failed ones, and who followed."""
        name, code = min(first.items(), key=lambda item: item[1] >= 0)
        time.sleep(COMPANION_SECONDS)
        others = [other for other, child in self._children.items() if other != name and child.poll() not in (None, 0)]
        lines = self._log(name).read_text(errors="replace").splitlines()[-LAST_LINES:]
        text = f"{name} died: {how(code)}\nlast lines of {self._log(name)}:\n" + "\n".join(
            f"  | {line}" for line in lines or ["(empty)"]
        )
        restarted = self._policy.count(name)
        text += f"\nit had been started again {restarted} times (cluster.max_restarts)" if restarted else ""
        return text + (f"\nafter it died: {', '.join(others)}" if others else "")

    def _stop(self, number: int, _: object) -> None:
        raise Stopped(number)

    def _stop_all(self) -> None:
        """The stop signal to each process group, then SIGKILL after the grace; then the sweep."""
        files = shared_files(child.pid for child in self._children.values())
        for name, child in reversed(self._children.items()):
            _signal_group(child.pid, self._specs[name].stop_signal)
        deadline = time.monotonic() + self._grace
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children.values():
            _signal_group(child.pid, signal.SIGKILL)  # also what is left of a group whose leader has gone
            child.wait()
        sweep(self._run_id, files)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def how(code: int) -> str:
    """How a process ended."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
