"""Starts the sandboxes of a backend, with bubblewrap or without isolation, and removes what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox import bubblewrap, cgroups, seccomp
from asyncrl.extensions.sandbox.program import MIB, Settings
from asyncrl.extensions.sandbox.protections import Kind, Protections, in_force
from asyncrl.extensions.sandbox.protocol import Limits
from asyncrl.extensions.sandbox.session import LocalSandbox, WorkerProcess

REMOVAL_SECONDS = 2.0
"""Time for removing a control group, which may stay busy for a moment after its last process has ended."""
_COUNTED_BY_NAMESPACE = (5, 14)
"""First version of Linux in which RLIMIT_NPROC counts per user namespace instead of per user of the machine."""
_HIGHEST_UID = 2_100_000_000
"""Upper end of the uids for programs, above the ranges that distributions assign to users and containers."""
_UIDS, _UIDS_OF_A_PROCESS = 1 << 25, 1 << 10
_numbers = count(1)
"""Numbers of the sandboxes of this process, over all of its backends."""
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Way:
    """One method of starting sandboxes on this machine."""

    kind: Kind
    bwrap: str = ""  # path of bubblewrap
    environment: Mapping[str, str] = field(default_factory=dict)  # environment of bubblewrap
    users: Sequence[str] = ()  # options of bubblewrap for users (bubblewrap.command)
    own_uid: str = ""  # which processes have an unused uid: "" (none), "programs" or "all"

    @property
    def counted(self) -> bool:
        """Return whether RLIMIT_NPROC counts only the processes of one sandbox."""
        release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
        return bool(self.own_uid) or (self.kind == "bubblewrap" and release >= _COUNTED_BY_NAMESPACE)


def ways(allow_unsafe: bool) -> tuple[list[Way], str]:
    """Return the methods to try, in order, and the reason why bubblewrap is not among them (else an empty string)."""
    bwrap, own_uids, found, why = bubblewrap.find(), guest_uid(0) is not None, [], ""
    if bwrap is None:
        why = "the program bwrap is neither in the virtual environment nor on PATH"
    elif not own_uids and _is_root_of_host():  # it owns the files of /proc/sys, whatever its capabilities
        why = "this process is root of the host and has no other uid for programs (see README.md beside this file)"
    else:
        one_user = [[*bubblewrap.ONE_USER, "--disable-userns"], bubblewrap.ONE_USER]
        found = [Way("bubblewrap", *bwrap, bubblewrap.OWN_USERS, "programs")] if own_uids else []
        found += [Way("bubblewrap", *bwrap, users, "all" if own_uids else "") for users in one_user]
    return [*found, *([Way("unsafe", own_uid="programs" if own_uids else "")] if allow_unsafe else [])], why


class SandboxStarter:
    """Starts sandboxes by one method."""

    def __init__(self, way: Way, limits: Limits, *, nested: bool) -> None:
        self.way, self._limits, self._nested = way, limits, nested
        self._marker, self._bases = cgroups.Marker.mine(), cgroups.bases()
        cgroups.sweep(self._bases)
        group = self._group()
        group.release()
        group.remove()
        self._bounds, self._filter, unfiltered = group.bounds, b"", ""
        try:
            self._filter = seccomp.program(sockets=way.kind == "bubblewrap", unseen_memory="memory" in self._bounds)
        except seccomp.Unavailable as error:
            unfiltered = str(error)
        self.protections: Protections = in_force(
            way.kind, own_uid=bool(way.own_uid), counted=way.counted, bounds=self._bounds, unfiltered=unfiltered
        )

    def start(self) -> LocalSandbox:
        """Start a sandbox in its own control group; a nested one with a second sandbox beside it.

        Raises EpisodeFailed.
        """
        group = self._group()
        beside: LocalSandbox | None = None
        try:
            if not self._bounds <= group.bounds:
                raise OSError("its control group cannot be created")
            if not self._nested:
                return self._worker(group)
            asks, serves = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with asks, serves:
                beside = self._worker(group, serves=serves)
                return self._worker(group, asks=asks, beside=beside)
        except OSError as error:
            if beside:
                beside.kill("the other sandbox of its pair cannot be started")
            group.remove()
            raise EpisodeFailed("sandbox", f"a sandbox cannot be started: {error}") from None
        finally:
            group.release()

    def _group(self) -> cgroups.ControlGroup:
        memory, name = self._limits.memory_mb * MIB, self._marker.name(next(_numbers))
        return cgroups.ControlGroup(self._bases, name, memory=memory, processes=self._limits.processes)

    def _worker(
        self,
        group: cgroups.ControlGroup,
        *,
        asks: socket.socket | None = None,
        serves: socket.socket | None = None,
        beside: LocalSandbox | None = None,
    ) -> LocalSandbox:
        """Start one worker. For `asks` and `serves` see Settings. Raises OSError."""
        number, isolated = next(_numbers), self.way.kind == "bubblewrap"
        own_uid = guest_uid(number) if self.way.own_uid else None
        uid = own_uid if self.way.own_uid == "programs" else None
        folder = None if isolated else _folder(self._marker.name(number), uid)

        async def remove() -> None:
            if folder:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            tries = 0 if serves else int(100 * REMOVAL_SECONDS)  # the other sandbox of the pair removes the group
            while tries and not group.remove():
                tries -= 1
                await asyncio.sleep(0.01)

        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.callback(theirs.close)
            files = {path: _holding(text.encode(), opened) for path, text in bubblewrap.FILES.items()}
            filter_ = _holding(self._filter, opened) if self._filter else None
            home = f"{folder}/home" if folder else bubblewrap.HOME
            settings = Settings(
                limits=asdict(self._limits),
                environment=bubblewrap.environment(home, f"{folder}/tmp" if folder else bubblewrap.TEMPORARY),
                folder=home,
                uid=uid,
                alone=isolated,
                rlimit_memory="memory" not in group.bounds,
                rlimit_processes=self.way.counted or not isolated,
                owner=theirs.fileno(),
                joins=group.joins,
                oom=group.oom,
                cpu=group.cpu,
                asks=asks.fileno() if asks else None,
                serves=serves.fileno() if serves else None,
                filter=None if isolated else filter_,
            )
            passed, words = set(settings.descriptors), bubblewrap.python(str(_ROOT))
            if isolated:
                disk, shown = self._limits.disk_mb * MIB, bubblewrap.shown()
                words = bubblewrap.command(self.way.bwrap, self.way.users, shown, disk, files=files, seccomp=filter_)
                passed |= {*files.values()} | ({filter_} if filter_ is not None else set())
            try:
                user = own_uid if self.way.own_uid == "all" else None
                worker = WorkerProcess([*words, json.dumps(settings._asdict())], self.way.environment, passed, user)
            except OSError:
                ours.close()
                if folder:
                    shutil.rmtree(folder)
                raise
            return LocalSandbox(worker, ours, self._limits, remove, beside)


def _holding(content: bytes, opened: ExitStack) -> int:
    """Return a descriptor from which the content can be read until `opened` is closed."""
    descriptor = os.memfd_create("sandbox")
    opened.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _folder(name: str, uid: int | None) -> Path:
    """Create the folder of a sandbox without isolation."""
    folder = Path(tempfile.gettempdir(), name)
    for path in (folder, folder / "home", folder / "tmp"):
        path.mkdir(mode=0o700)
        if uid is not None:
            os.chown(path, uid, uid)
    return folder


def guest_uid(number: int, maps: Path = Path("/proc/self")) -> int | None:
    """Return an unused uid, which also serves as gid, for the programs of a sandbox.

    Return None unless this process is root and has uids to assign. Root of a container has those of the container's
    map (user_namespaces(7)).
    """
    if os.geteuid():
        return None
    first, end = 0, _HIGHEST_UID
    for name in ("uid_map", "gid_map"):
        ranges = [tuple(map(int, line.split())) for line in (maps / name).read_text().splitlines()]
        inside, _, size = max(ranges, key=lambda found: found[2])
        first, end = max(first, inside), min(end, inside + size)
    uids = min(_UIDS, (end - first) // 2)  # take the upper ones
    return end - 1 - (os.getpid() * _UIDS_OF_A_PROCESS + number % _UIDS_OF_A_PROCESS) % uids if uids > 1 else None


def _is_root_of_host() -> bool:
    """Return whether this process is root, and its uid 0 may be uid 0 of the host."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return os.geteuid() == 0 and any(inside == outside == "0" for inside, outside, _ in ranges)
