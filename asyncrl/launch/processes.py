"""The supervisor: owns every process of a run on this machine.

waits for     the death of a process, or a signal to stop
on a stall    of a process that reports its progress: kills it if it may be restarted, otherwise writes down what each
              of them was doing, and ends the run
on death      restarts an engine, the router, or all trainers, once the run has started (launch/restarts.py). If any
              other process ends, except a trainer that has finished, ends the run and reports the process, its machine,
              how it ended and its last lines
on SIGHUP     ends the run as on SIGTERM: its terminal is gone (nohup prevents it)
on SIGUSR1    asks the run to end with a checkpoint (by the file STOP, which the trainer polls)
always        stops every process, clients before servers, and kills processes that outlived their parent, found by the
              run's id in their environment; nothing is left behind. If the launcher gets SIGKILL, the kernel kills each
              child, at the child's request; what children have started is killed when the run is resumed
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import Paused, ProcessDied, Stopped
from asyncrl.launch.leftovers import SHARED, Scratch, die_with_parent, signal_group
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.restarts import RestartPolicy
from asyncrl.launch.run_folder import full, shared_memory
from asyncrl.launch.stalls import ANSWER_SECONDS, STACK_SECONDS, Stalled, Stalls, stack_file, write_stack
from asyncrl.network.addresses import PEER_FAILED, STOP, STOPPED
from asyncrl.progress import DUMP_SIGNAL, FAILURE, FOLDER, end_file, failures

POLL_SECONDS = 0.1
LAST_LINES = 20
SHOWN_LINES = 5
"""Lines of a recorded error that are shown: with a traceback in it, its first line says what and where."""
COMPANION_SECONDS = 1.0  # wait this long after a death, to tell its cause from the deaths that it causes
PEER_SECONDS = 15.0
"""Seconds within which a process ends after it has reported the failure of a peer: it closes its connections first."""
STEP_SECONDS = 15.0
"""Seconds within which a cluster kills a step."""


class Supervisor:
    """Starts the specified processes, watches them, and leaves nothing behind."""

    def __init__(
        self,
        specs: list[ProcessSpec],
        run_dir: Path,
        run_id: str,
        grace: float,
        policy: RestartPolicy | None = None,
        on_signal: Callable[[int], None] | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        """`on_signal` replaces the default handling of signals; `stalls` detects processes that make no progress."""
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir, self._run_id, self._grace = run_dir, run_id, grace
        self._policy = policy or RestartPolicy(run_dir)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()  # stopped for good: they have left, or were lost with their machine
        self._on_signal, self._stalls = on_signal, stalls

    def run(self, each_poll: Callable[[], None]) -> None:
        """Run until the trainers have finished, or, if there are none, until all processes have left. Raises
        ProcessDied, Stopped or Paused. All processes are gone in every case."""
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._stop)
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_to_stop)
        self._scratch = Scratch(self._run_id)
        try:
            for file in (self._run_dir / FOLDER).glob(f"*{FAILURE}"):  # left by an earlier launcher of this run
                file.unlink()
            for name in self._specs:
                self._start(name)
            while not self._finished():
                each_poll()
                self._scratch.note(child.pid for child in self._children.values())
                if self._stalls and (stalled := self._stalls.find()) and not self._replace(stalled):
                    recorded = failures(self._run_dir)
                    cause = [_first(recorded)] if recorded else []
                    raise ProcessDied("\n".join([*cause, self._describe(self._stalls, stalled)]))
                time.sleep(POLL_SECONDS)
            each_poll()
        finally:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)  # stopping must not be interrupted half-way
            self._stop_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, name: str) -> None:
        spec = self._specs[name]
        self._forget_stall(name)
        (self._run_dir / FOLDER / f"{name}{FAILURE}").unlink(missing_ok=True)
        self._scratch.starts()
        # to a file instead of a pipe, which grandchildren may keep open for long
        with self._log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                spec.argv,
                env={
                    **os.environ,
                    **spec.env,
                    **self._scratch.environment,
                    "ASYNCRL_INCARNATION": self._policy.incarnation(name),
                    "ASYNCRL_DIED_AT": str(self._policy.died_at(name)),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM if spec.step else signal.SIGKILL),
            )

    def _replace(self, stalled: Sequence[Stalled]) -> bool:
        """Kill the stalled processes that may be started again. Return whether there are any."""
        found = [one for one in stalled if self._policy.allows(self._specs[one.name])]
        for one in found:
            print(f"asyncrl: {one.name} makes no progress ({one.doing}); killing it", file=sys.stderr, flush=True)
            if not self._specs[one.name].step:
                write_stack(self._children[one.name].pid, stack_file(self._run_dir / "logs", one.name))
            self._send(one.name, signal.SIGKILL)
            self._forget_stall(one.name)
        return bool(found)

    def _forget_stall(self, name: str) -> None:
        if self._stalls and self._specs[name].reports:
            self._stalls.forget(name)

    def _finished(self) -> bool:
        """Handle all deaths since the last call. Return whether the run is over: all trainers ended well, or without
        trainers, all processes have left. Raises ProcessDied when a process ends that may not be restarted."""
        for name in [*self._policy.given_up(self._specs.values()), *self._policy.hanging()]:
            self._send(name, signal.SIGKILL)
        for name in self._policy.may_stop(spec for name, spec in self._specs.items() if name not in self._gone):
            self._give_up(name, f"{name} has left the run")
            self._policy.stopped(self._specs[name])
        codes = {name: child.poll() for name, child in self._children.items() if name not in self._gone}
        dead = {name: code for name, code in codes.items() if code is not None}
        ends = {name for name, spec in self._specs.items() if spec.ends_the_run}
        wrong = {name: code for name, code in dead.items() if code or name not in ends or self._is_behind(name)}
        wrong = {name: code for name, code in wrong.items() if not self._leaves(name)}
        lost = {name for name in wrong if self._policy.lost(self._specs[name])}
        for name in lost:
            whole = self._whole(name)
            left = self._engines() - whole
            if self._engines() & whole and left - dead.keys():
                node = self._specs[name].node
                self._give_up(
                    name,
                    f"{name} was lost together with the machine {node}; the run continues with {len(left)} engines",
                )
                wrong = {other: code for other, code in wrong.items() if other not in whole}
        stopped = bool(ends) and (self._run_dir / STOPPED).exists()
        if stopped and ends & wrong.keys():  # behind its last checkpoint; started again, it would train on
            raise Paused("ended as requested")
        final = {
            name: code for name, code in wrong.items() if name in lost or not self._policy.allows(self._specs[name])
        }
        if final:
            raise ProcessDied(self._diagnosis(final))
        if ends <= dead.keys() - wrong.keys() and (ends or self._gone >= self._specs.keys()):
            if stopped:
                raise Paused("ended as requested")
            return True
        for name, code in wrong.items():
            self._send(name, signal.SIGKILL)  # what is left of its process group
            for mate in self._mates(name) - dead.keys():
                self._send(mate, signal.SIGKILL)
            if self._policy.may_start_now(self._specs[name], f"{how(code)}; see {self._log(name)}"):
                self._start(name)
        return False

    def _engines(self) -> set[str]:
        """Return the policy's engines that are not given up."""
        return {name for name, spec in self._specs.items() if spec.url} - self._gone

    def _give_up(self, name: str, text: str) -> None:
        """Kill a process and those that live and die with it, and never restart them."""
        for mate in self._whole(name):
            self._send(mate, signal.SIGKILL)
        self._gone |= self._whole(name)
        print(f"asyncrl: {text}", file=sys.stderr, flush=True)

    def _leaves(self, name: str) -> bool:
        """Return whether the process, or the engine of which it is a rank, is asked to leave. Any exit then counts as
        leaving."""
        return any(self._policy.leaves(self._specs[mate]) for mate in self._whole(name))

    def _whole(self, name: str) -> set[str]:
        """Return the process and those that live and die with it."""
        together = self._specs[name].together
        return {name, *(mate for mate, spec in self._specs.items() if together and spec.together == together)}

    def _mates(self, name: str) -> set[str]:
        """Return the other processes that must die with it: those not yet restarted for this death."""
        times = self._policy.count(name)
        return {mate for mate in self._whole(name) - {name} if self._policy.count(mate) <= times}

    def _is_behind(self, name: str) -> bool:
        """Return whether others that live and die with it were started again since it ended, and wait for it."""
        return any(self._policy.count(mate) > self._policy.count(name) for mate in self._whole(name))

    def _send(self, name: str, number: int) -> None:
        """Send a signal to a process and its group, or to what runs it as a step alone: srun has a child that would die
        of it. An srun that is killed could not kill its step, and gets SIGTERM instead."""
        child = self._children[name]
        if not self._specs[name].step:
            signal_group(child.pid, number)
        elif child.poll() is None:
            child.send_signal(signal.SIGTERM if number == signal.SIGKILL else number)

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _diagnosis(self, first: dict[str, int]) -> str:
        """Describe the first process that died, killed ones before failed ones, with the error that it recorded or the
        last lines of its log, and list those that followed. Of several that recorded an error, the earliest was first.
        If the dead processes blame a peer and that peer dies soon, it is described instead."""
        blaming = all(code == PEER_FAILED for code in first.values())
        deadline = time.monotonic() + (PEER_SECONDS if blaming else COMPANION_SECONDS)
        while time.monotonic() < deadline and (not blaming or self._ended().keys() <= first.keys()):
            time.sleep(POLL_SECONDS)
        ended = self._ended()
        own = {name: code for name, code in ended.items() if code != PEER_FAILED} if blaming else {}
        name, code = min((own or first).items(), key=lambda item: item[1] >= 0)
        recorded = failures(self._run_dir) if code > 0 else []
        if recorded and recorded[0]["process"] in ended:
            name = recorded[0]["process"]
            code = ended[name]
        others = [other for other in ended if other != name]
        who, end, log = self._first_of(name, code)
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
        said = f"last lines of {log}:\n" + "\n".join(f"  | {line}" for line in lines or ["(empty)"])
        text = f"{who} died: {end}\n" + (f"{_first(recorded)}\nits log: {log}" if recorded else said)
        restarted = self._policy.count(name)
        text += f"\n{name} had been restarted {restarted} times (cluster.max_restarts)" if restarted else ""
        text = "\n".join([text, *self._policy.recoveries()])
        text += f"\nended afterwards: {', '.join(others)}" if others else ""
        where = [self._run_dir, Path(tempfile.gettempdir()), SHARED]
        return "\n".join([text, *full(where), *shared_memory(code, text, self._run_dir)])

    def _describe(self, stalls: Stalls, stalled: Sequence[Stalled]) -> str:
        """Describe what the stalled processes, and all others that report their progress, are doing. The processes of a
        step are described on their own machines, by their tasks."""
        logs = self._run_dir / "logs"
        for file in logs.glob("*.stack"):
            file.unlink(missing_ok=True)
        deadline = time.monotonic() + STACK_SECONDS
        steps = [name for name in self._children if self._specs[name].step and self._specs[name].reports]
        for name in steps:
            self._send(name, DUMP_SIGNAL)
        for name in sorted(stalls.names, key=[one.name for one in stalled].__contains__, reverse=True):
            if name in self._children and not self._specs[name].step and time.monotonic() < deadline:
                write_stack(self._children[name].pid, stack_file(logs, name))
        while (
            steps and time.monotonic() < deadline and not all(stack_file(logs, name).exists() for name in stalls.names)
        ):
            time.sleep(POLL_SECONDS)
        time.sleep(ANSWER_SECONDS)
        return stalls.message(stalled, logs)

    def _ended(self) -> dict[str, int]:
        """Return the exit codes of the processes that did not end well."""
        codes = {name: child.poll() for name, child in self._children.items()}
        return {name: code for name, code in codes.items() if code}

    def _first_of(self, name: str, code: int) -> tuple[str, str, Path]:
        """Return who died, how, and its log. A step may consist of several processes, whose tasks have recorded their
        ends."""
        if not self._specs[name].step:
            return name, how(code), self._log(name)
        ranks = (self._run_dir / FOLDER).glob(f"{name}-*.end")
        files = [file for file in (end_file(self._run_dir, name), *ranks) if file.exists()]
        told = sorted((json.loads(file.read_text()) for file in files), key=lambda end: (end["code"] >= 0, end["at"]))
        if not told:
            return f"{name} on {self._specs[name].node}", f"its step: {how(code)}", self._log(name)
        end = told[0]
        return f"{end['name']} on {end['node']}", how(end["code"]), self._log(end["name"])

    def _stop(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self._on_signal is None:
            raise Stopped(number)
        self._on_signal(number)

    def _ask_to_stop(self, number: int, _: object) -> None:
        if self._on_signal is None:
            (self._run_dir / STOP).touch()
        else:
            self._on_signal(number)

    def _stop_all(self) -> None:
        """Send the stop signal to each process group, and SIGKILL after the grace; then clean up. Servers that are
        killed at once come last, so that their clients log no errors."""
        leaders = [child.pid for child in self._children.values()]
        self._scratch.see(leaders)
        killed = {name for name, spec in self._specs.items() if spec.killed_at_once} & self._children.keys()
        for names in (self._children.keys() - killed, killed):
            for name in names:
                self._send(name, self._specs[name].stop_signal)
            self._wait(names, self._grace)
        steps = [name for name in self._children if self._specs[name].step]
        for name in steps:
            self._send(name, signal.SIGTERM)
        self._wait(steps, STEP_SECONDS)
        for child in self._children.values():
            signal_group(child.pid, signal.SIGKILL)  # also what is left of a group whose leader has ended
            child.wait()
        self._scratch.remove()

    def _wait(self, names: Iterable[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for name in names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._children[name].wait(max(0.0, deadline - time.monotonic()))


def _first(recorded: Sequence[dict[str, Any]]) -> str:
    """Return the first recorded error, and where the user's code raised it."""
    first, *_ = recorded
    text = first["error"].splitlines() or [""]
    short = "\n".join([*text[:SHOWN_LINES], *(["  ..."] if len(text) > SHOWN_LINES else [])])
    where = first["place"] if first["place"] not in first["error"] else ""
    return f"{first['process']}: {short}" + (f"\n  at {where}" if where else "")


def _leave_terminal() -> None:
    """Write to nowhere instead of a terminal that is gone, where writing raises OSError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def how(code: int) -> str:
    """Describe how a process ended."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
