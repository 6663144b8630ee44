"""The spawner: makes the sandboxes of one backend, each under a supervisor of its own, and removes what they leave.

A process of its own, so that the rollout process never forks, a sandbox begins as a fork of a small process that has
imported all it needs, and somebody cleans up after a rollout process that was killed.

waits for     requests of the rollout process, its end, the end of a supervisor
on its death  every supervisor ends (it is their guardian); folders and control groups are removed by the next spawner
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.envs.sandbox import cgroups, linux, seccomp
from asyncrl.envs.sandbox.guest import MIB
from asyncrl.envs.sandbox.identity import Identity
from asyncrl.envs.sandbox.leftovers import PREFIX, Marker
from asyncrl.envs.sandbox.processes import kill_descendants
from asyncrl.envs.sandbox.starts import STARTS, Order, Site, Started
from asyncrl.envs.sandbox.wire import frame

MESSAGE = 65536
"""Bytes of a request or a notice at most."""
REMOVAL_SECONDS = 2.0
"""A control group whose last process has just been reaped may still be busy."""
_RETRY_SECONDS = 0.01


@dataclass
class _Box:
    """A sandbox, from its beginning to its removal."""

    number: int
    started: Started
    alive: int  # pidfds: of its child,
    victim: int  # and of its victim
    group: cgroups.ControlGroup
    text: str = ""
    removed_by: float = 0.0


class Spawner:
    """Serves one backend."""

    def __init__(self, owner: socket.socket, order: Order) -> None:
        self._owner, self._order = owner, order
        self._marker = Marker.mine()
        self._bases = cgroups.bases()
        self._identity = Identity.mine()
        self._guardian = os.pidfd_open(os.getpid())
        self._poll = select.poll()
        self._boxes: dict[int, _Box] = {}  # by pidfd
        self._dead: list[_Box] = []

    def serve(self) -> None:
        """Until the owner has gone; then nothing is left."""
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        self._sweep()
        self._say(facts=self._facts())
        try:
            owner_alive = os.pidfd_open(self._order.owner)
        except ProcessLookupError:
            return
        self._poll.register(self._owner, select.POLLIN)
        self._poll.register(owner_alive, select.POLLIN)
        going = True
        while going or self._boxes or self._dead:
            ready = {end for end, _ in self._poll.poll(1000 * _RETRY_SECONDS if self._dead else None)}
            if going and (owner_alive in ready or (self._owner.fileno() in ready and not self._obey())):
                going = False
                for end in (owner_alive, self._owner):
                    self._poll.unregister(end)
                for box in self._boxes.values():
                    self._kill(box)
            for end in ready & self._boxes.keys():
                self._bury(self._boxes.pop(end))
            self._dead = [box for box in self._dead if not self._removed(box)]
        self._sweep()  # what was still busy at the first one

    def _sweep(self) -> None:
        """What dead spawners left."""
        cgroups.sweep(self._bases)
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
            marker = Marker.of(folder.name)
            if marker and not marker.alive():
                shutil.rmtree(folder, ignore_errors=True)

    def _facts(self) -> dict[str, Any]:
        group = self._group(0)
        group.release()
        group.remove()
        identity = self._identity
        facts = {"own_uid": identity.own, "counted": identity.counted, "filtered": seccomp.supported()}
        return {"bounds": sorted(group.bounds), **facts}

    def _group(self, number: int) -> cgroups.ControlGroup:
        limits = self._order.limits
        name = self._marker.name(number)
        return cgroups.ControlGroup(self._bases, name, memory=limits["memory_mb"] * MIB, processes=limits["processes"])

    def _obey(self) -> bool:
        """One request; False when there will be no more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._owner, MESSAGE, 1)
        except ConnectionResetError:  # it has not read what we said
            return False
        if not data:
            return False
        request = json.loads(data)
        if "close" in request:
            for box in self._boxes.values():
                if box.number == request["close"]:
                    self._kill(box)
        else:
            with socket.socket(fileno=descriptors[0]) as connection:
                self._open(request["open"], connection)
        return True

    def _open(self, number: int, connection: socket.socket) -> None:
        group, name = self._group(number), self._marker.name(number)
        site = Site(self._order, self._identity, self._guardian, number, name, connection, group)
        try:
            started = STARTS[self._order.kind](site)
            box = _Box(number, started, os.pidfd_open(started.child), os.pidfd_open(started.victim), group)
        except OSError as error:  # a child that began all the same finds that its owner has gone
            with suppress(OSError):
                connection.sendall(frame({"fault": str(error)}))
            group.remove()
            self._say(gone=number, text=str(error))
        else:
            self._boxes[box.alive] = box
            self._poll.register(box.alive, select.POLLIN)
        finally:
            group.release()

    def _kill(self, box: _Box) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(box.victim, signal.SIGKILL)

    def _bury(self, box: _Box) -> None:
        """Its processes: all dead in a pid namespace, else those that outlive their supervisor become ours."""
        self._poll.unregister(box.alive)
        os.close(box.alive)
        os.close(box.victim)
        os.waitpid(box.started.child, 0)
        if box.started.words is not None:
            with open(box.started.words, "rb") as words:
                box.text = words.read(4096).decode(errors="replace")
        if self._order.kind == "processes":
            self._end_orphans()
        box.removed_by = time.monotonic() + REMOVAL_SECONDS
        self._dead.append(box)

    def _end_orphans(self) -> None:
        spared = [box.started.child for box in self._boxes.values()]
        deadline = time.monotonic() + REMOVAL_SECONDS
        while (orphans := kill_descendants(os.getpid(), spared)) and time.monotonic() < deadline:
            for pid in orphans:
                with suppress(ChildProcessError):  # its parent was killed a moment ago
                    os.waitpid(pid, os.WNOHANG)

    def _removed(self, box: _Box) -> bool:
        """Whether what it left is gone now, or never will be."""
        if box.started.folder:
            shutil.rmtree(box.started.folder, ignore_errors=True)
        if not box.group.remove() and time.monotonic() < box.removed_by:
            return False
        self._say(gone=box.number, text=box.text)
        return True

    def _say(self, **notice: Any) -> None:
        with suppress(OSError):  # nobody listens any more
            self._owner.send(json.dumps(notice).encode())


def main() -> None:
    """Serve the owner at the other end of a descriptor, as the order says: both are arguments."""
    os.umask(0o022)  # that of who started us is not for guests
    Spawner(socket.socket(fileno=int(sys.argv[1])), Order(**json.loads(sys.argv[2]))).serve()
