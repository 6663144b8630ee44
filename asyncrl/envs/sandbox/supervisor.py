"""The supervisor of one sandbox: the first process in its namespaces, which starts guests and ends them.

Guests cannot harm it: as the first process of its pid namespace it gets no signal from inside, it cannot be traced (not
dumpable), it has another uid where the machine gives us more than one, and seccomp.py refuses what is left. When it
ends the kernel kills everything in the namespace.

waits for     its owner's requests; during a call see call.py
ends          when the owner's end of the socket is closed, or the spawner (its guardian) has died
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.envs.sandbox import linux
from asyncrl.envs.sandbox.beside import PROCESSES
from asyncrl.envs.sandbox.call import Call, Fault
from asyncrl.envs.sandbox.folder import Folder
from asyncrl.envs.sandbox.guest import MIB, Confinement
from asyncrl.envs.sandbox.meter import Bounds, Meter
from asyncrl.envs.sandbox.processes import descendants, kill_descendants
from asyncrl.envs.sandbox.wire import Header, frame, receive

Reply = tuple[Header, bytes]


@dataclass(frozen=True)
class Place:
    """Where a supervisor finds itself; JSON on its way through bubblewrap."""

    owner: int  # descriptors: a stream socket,
    guardian: int  # a pidfd,
    oom: int | None  # and a control group's files
    cpu: int | None
    alone: bool  # in a pid namespace of its own, as its first process
    polled: str | None  # what is to be kept within disk_mb, where nothing else does
    confinement: dict[str, Any]

    @property
    def descriptors(self) -> set[int]:
        """All that it needs."""
        groups = {self.oom, self.cpu, *self.confinement["joins"]} - {None}
        return {self.owner, self.guardian, *groups}


def keep_only(descriptors: Iterable[int]) -> None:
    """Close all but these and 0, 1 and 2; exec closes them too."""
    kept = {0, 1, 2, *descriptors}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing itself
            if descriptor not in kept:
                os.close(descriptor)
            elif descriptor > 2:
                os.set_inheritable(descriptor, False)


class SandboxSupervisor:
    """Serves the owner of one sandbox."""

    def __init__(self, place: Place) -> None:
        self._place, self._confinement = place, Confinement(**place.confinement)
        self._owner = socket.socket(fileno=place.owner)
        uid = self._confinement.uid
        self._folder = Folder(self._confinement.folder, None if uid is None else (uid, uid))
        self._ending = False

    def serve(self) -> None:
        """Until the owner or the guardian has gone."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the first process of a namespace: never
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self._owner.sendall(frame({"ready": True}))
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        poll.register(self._place.guardian, select.POLLIN)
        while not self._ending:
            if any(end == self._place.guardian for end, _ in poll.poll()):
                return
            if (message := receive(self._owner)) is None:
                return
            header, body = message
            if header["do"] != "stop":  # or it comes too late
                answer, data = self._answer(header, body)
                if not self._ending:  # a call that ends for that has no outcome
                    with suppress(BrokenPipeError, ConnectionResetError):
                        self._owner.sendall(frame(answer, data))

    def _answer(self, header: Header, body: bytes) -> Reply:
        try:
            if header["do"] == "run":
                return self._run(header, body)
            if header["do"] == "write":
                self._folder.write(header["path"], body)
                return {}, b""
            return {}, self._folder.read(header["path"], int(header["most"]))
        except ValueError as error:
            return {"refused": str(error)}, b""
        except Fault as error:
            return {"fault": str(error)}, b""
        except OSError as error:
            if header["do"] == "run":
                return {"fault": f"cannot start a process: {error}"}, b""
            return {"errno": error.errno, "text": error.strerror}, b""

    def _run(self, header: Header, stdin: bytes) -> Reply:
        limits = self._confinement.limits
        processes = limits["processes"] + (PROCESSES if self._confinement.nested else 0)
        bounds = Bounds(
            cpu_seconds=limits["cpu_seconds"],
            memory=limits["memory_mb"] * MIB if self._place.oom is None else None,
            processes=None if self._confinement.rlimit_processes and self._place.alone else processes,
            disk=limits["disk_mb"] * MIB,
        )
        meter = Meter(bounds, self._others, self._place.polled, self._place.oom, self._place.cpu)
        call = Call(
            self._confinement, self._folder.descriptor, header["command"], header["env"], stdin, header["seconds"]
        )
        reason = call.wait(meter, self._owner, self._place.guardian, self._stopped)
        ended = call.end(reason, meter, self._kill)
        answer = {"reason": ended.reason, "exit_code": ended.exit_code, "seconds": ended.seconds}
        return {**answer, "split": len(ended.outputs[0])}, b"".join(ended.outputs)

    def _stopped(self) -> bool:
        """Whether this call is to end: by the owner's word, or because nobody is left to hear of it."""
        if not select.select([self._owner], [], [], 0)[0]:  # so it is the guardian
            self._ending = True
            return True
        self._ending = receive(self._owner) is None
        return True  # nothing else is said during a call, and of a call that ended before no later than this one began

    def _others(self) -> list[int]:
        """The processes of the sandbox, without this one."""
        if self._place.alone:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants(os.getpid())

    def _kill(self) -> None:
        if self._place.alone and os.getpid() == 1:  # anywhere else -1 is everybody
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            kill_descendants(os.getpid())
