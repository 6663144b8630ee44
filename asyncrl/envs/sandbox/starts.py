"""The three ways in which a supervisor begins.

Each returns when the spawner need not wait for it any more; the supervisor itself tells its owner that it is ready, or
what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.envs.sandbox import bubblewrap, linux, mounts, seccomp, view
from asyncrl.envs.sandbox.cgroups import ControlGroup
from asyncrl.envs.sandbox.guest import MIB, Confinement
from asyncrl.envs.sandbox.identity import Identity
from asyncrl.envs.sandbox.supervisor import Place, SandboxSupervisor, keep_only
from asyncrl.envs.sandbox.wire import frame


@dataclass(frozen=True)
class Order:
    """What the sandboxes of a backend are; JSON on its way from the rollout process."""

    kind: str  # bubblewrap, namespaces or processes
    owner: int  # pid of the rollout process
    limits: dict[str, Any]  # the fields of protocol.Limits
    bwrap: str  # its path
    shown: list[str]  # view.shown()
    environment: dict[str, str]  # of guests
    nested: bool  # whether these may have programs started beside them


@dataclass(frozen=True)
class Site:
    """Where one sandbox is to be."""

    order: Order
    identity: Identity
    guardian: int
    number: int
    name: str
    owner: socket.socket
    group: ControlGroup

    def place(
        self,
        *,
        alone: bool,
        polled: str | None,
        uid: int | None,
        beside: int | None,
        folder: str = view.HOME,
        **more: Any,
    ) -> Place:
        """For its supervisor."""
        confinement = Confinement(
            limits=self.order.limits,
            uid=uid,
            beside=beside,
            nested=self.order.nested,
            rlimit_memory="memory" not in self.group.bounds,
            folder=folder,
            joins=self.group.joins,
            filtered=seccomp.supported(),
            **{"environment": self.order.environment, **more},
        )
        group = self.group
        return Place(self.owner.fileno(), self.guardian, group.oom, group.cpu, alone, polled, asdict(confinement))


@dataclass(frozen=True)
class Started:
    """A supervisor, as the spawner keeps it."""

    victim: int  # pid of the first process of the sandbox, whose death ends all others
    child: int  # pid of ours that ends last
    folder: Path | None = None  # on the host
    words: int | None = None  # descriptor with what it says to people


def in_namespaces(site: Site) -> Started:
    """A fork in namespaces of its own, by way of a process that makes them: a pid namespace begins with a child."""
    (heard, say), (hear, said) = os.pipe(), os.pipe()
    stage = os.fork()
    if stage == 0:
        with _to_the_end(site.owner):
            os.close(said)
            linux.unshare(linux.CLONE_NEWUSER | linux.NEW_NAMESPACES)
            os.write(say, b"made")
            if not os.read(hear, 1):
                os._exit(1)
            if supervisor := os.fork():
                os.write(say, struct.pack("i", supervisor))
                os._exit(0)
            uid, beside = (view.UID, view.BESIDE_UID) if site.identity.own else (None, None)
            counted = site.identity.counted
            place = site.place(alone=True, polled=None, uid=uid, beside=beside, rlimit_processes=counted)
            keep_only(place.descriptors)
            mounts.enter(site.order.shown, site.order.limits["disk_mb"] * MIB, uid)
            SandboxSupervisor(place).serve()
    os.close(say)
    os.close(hear)
    try:
        if os.read(heard, 4) == b"made":
            site.identity.write_maps(stage, site.number)
            os.write(said, b"x")
        pid = os.read(heard, 4)
    finally:
        os.close(heard)
        os.close(said)
        os.waitpid(stage, 0)
    if len(pid) < 4:
        raise OSError("the namespaces cannot be made")
    (supervisor,) = struct.unpack("i", pid)
    return Started(victim=supervisor, child=supervisor)


def in_bubblewrap(site: Site) -> Started:
    """A new Python below bubblewrap."""
    uid, beside = site.identity.strangers_of(site.number)
    counted = site.identity.counted
    place = site.place(alone=True, polled=view.WRITABLE, uid=uid, beside=beside, rlimit_processes=counted)
    (told, tell), (heard, say) = os.pipe(), os.pipe()
    files = {path: _holding(text) for path, text in view.FILES.items()}
    bwrap = os.fork()
    if bwrap == 0:
        with _to_the_end(site.owner):
            os.dup2(say, 2)
            for descriptor in (tell, *files.values(), *place.descriptors):
                os.set_inheritable(descriptor, True)
            disk = site.order.limits["disk_mb"] * MIB
            words = bubblewrap.command(
                site.order.bwrap, site.order.shown, disk, uid, info=tell, files=files, place=json.dumps(asdict(place))
            )
            os.execve(words[0], words, {})
    for descriptor in (tell, say, *files.values()):
        os.close(descriptor)
    with open(told, "rb") as information:
        text = information.read()
    if not text:
        os.waitpid(bwrap, 0)
        with open(heard, "rb") as words_of_it:
            raise OSError(words_of_it.read(4096).decode(errors="replace").strip() or "bubblewrap said nothing")
    return Started(victim=json.loads(text)["child-pid"], child=bwrap, words=heard)


def as_processes(site: Site) -> Started:
    """A fork without namespaces: what is left where the kernel gives none."""
    uid, beside = site.identity.strangers_of(site.number)
    folder = Path(tempfile.gettempdir(), site.name)
    home = folder / "home"
    for path in (folder, home, folder / "tmp"):
        path.mkdir(mode=0o700)
        if uid is not None:
            path.chmod(view.SHARED)
            os.chown(path, uid, uid)
    place = site.place(
        alone=False,
        polled=str(folder),
        uid=uid,
        beside=beside,
        folder=str(home),
        environment=site.order.environment | {"HOME": str(home), "TMPDIR": str(folder / "tmp")},
        sockets=False,
        count_user=True,
    )
    try:
        supervisor = os.fork()
    except OSError:
        shutil.rmtree(folder)
        raise
    if supervisor == 0:
        with _to_the_end(site.owner):
            keep_only(place.descriptors)
            os.setsid()
            SandboxSupervisor(place).serve()
    return Started(victim=supervisor, child=supervisor, folder=folder)


STARTS: dict[str, Callable[[Site], Started]] = {
    "bubblewrap": in_bubblewrap,
    "namespaces": in_namespaces,
    "processes": as_processes,
}


@contextmanager
def _to_the_end(owner: socket.socket) -> Iterator[None]:
    """Of a forked process: it never returns to what its parent was about to do."""
    try:
        yield
        os._exit(0)
    except OSError as error:
        with suppress(OSError):
            owner.sendall(frame({"fault": str(error)}))
    finally:
        if not isinstance(sys.exc_info()[1], OSError | None):
            traceback.print_exc()
        os._exit(1)


def _holding(text: str) -> int:
    """A descriptor from which this little can be read."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader
