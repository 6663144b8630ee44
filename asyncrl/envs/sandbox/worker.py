"""The worker: the first process in a sandbox, a small Python that stays warm and forks the program of every call.

It runs inside of the sandbox (in its own pid namespace it is process 1) and serves its owner, the rollout process, over
a socket (session.py). Only Python's library is imported: nothing else can be seen from there.

Programs cannot harm it. As process 1 it gets no signal from inside, it cannot be traced (not dumpable), it has another
uid if the owner is root, and the system-call filter refuses what is left (seccomp.py). When it ends, the kernel kills
everything in the namespace.

Over the socket pass frames, in both directions:

    4 bytes length of the header | 4 bytes length of the body | header (JSON object) | body

Programs of a *nested* sandbox can have others started that cannot reach them: in a second sandbox beside theirs, whose
worker listens at the other end of a socket. Its descriptor is BESIDE in their environment. To each message

    {"command": [...], "env": {...}}, with descriptors: one end of a stream socket, then what becomes 0, 1, 2, 3, ...

that worker starts a program. Over the stream comes {"code": exit code, or the signal's negative number} or {"fault":
why it could not be started}. The program is killed when the other end of the stream is closed. One runs at a time.

waits for     requests of its owner; during a call see call.py
on a hang     the owner kills it; it ends when the owner's end of the socket is closed
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from asyncrl.envs.sandbox.call import Call, Fault
from asyncrl.envs.sandbox.program import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    WRITABLE,
    Settings,
    install_filter,
    prctl,
)

BESIDE = "ASYNCRL_BESIDE"
WRITABLE_FOLDERS = ("home", "tmp", "shm")
LENGTHS = struct.Struct("!II")
Header = dict[str, Any]
_MESSAGE, _DESCRIPTORS = 65536, 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def frame(header: Header, body: bytes = b"") -> bytes:
    """Return one message."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def receive(connection: socket.socket) -> tuple[Header, bytes] | None:
    """Return the next message of a blocking socket; None when the other end has gone."""
    lengths = connection.recv(LENGTHS.size, socket.MSG_WAITALL)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    data = connection.recv(head + body, socket.MSG_WAITALL)
    return (json.loads(data[:head]), data[head:]) if len(data) == head + body else None


class SandboxWorker:
    """Serves the owner of one sandbox."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._owner = socket.socket(fileno=settings.owner)
        self._serves = None if settings.serves is None else socket.socket(fileno=settings.serves)
        self._folder = Folder(settings.folder, settings.uid)

    def serve(self) -> None:
        """Serve until the owner has gone."""
        self._owner.sendall(frame({"ready": True}))
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        if self._serves:
            poll.register(self._serves, select.POLLIN)
        while True:
            ready = {end for end, _ in poll.poll()}
            if self._settings.owner in ready:
                if (message := receive(self._owner)) is None:
                    return
                if message[0]["do"] != "stop":  # or it comes too late
                    self._owner.sendall(frame(*self._answer(*message)))
            elif self._serves and not self._run_beside(self._serves):
                poll.unregister(self._serves)

    def _answer(self, header: Header, body: bytes) -> tuple[Header, bytes]:
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

    def _run(self, header: Header, stdin: bytes) -> tuple[Header, bytes]:
        env = header["env"] if self._settings.asks is None else {**header["env"], BESIDE: "3"}
        call = Call(self._settings, self._folder.descriptor, header["command"], env, header["seconds"], stdin=stdin)
        reason = call.wait([self._settings.owner])
        ended = call.end(reason)
        if reason == "killed":
            receive(self._owner)  # the word to stop: nothing else is said during a call
        answer = {"reason": ended.reason, "exit_code": ended.exit_code, "seconds": ended.seconds}
        return {**answer, "split": len(ended.outputs[0])}, b"".join(ended.outputs)

    def _run_beside(self, asked: socket.socket) -> bool:
        """Run what a program of the other sandbox asks for. Return whether that sandbox is still there."""
        data, ends, _, _ = socket.recv_fds(asked, _MESSAGE, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        order = json.loads(data)
        with socket.socket(fileno=ends[0]) as stream:
            try:
                home, seconds = self._folder.descriptor, self._settings.limits["seconds"]
                try:
                    call = Call(self._settings, home, order["command"], order["env"], seconds, ends=ends[1:])
                finally:
                    for end in ends[1:]:
                        os.close(end)
                reason = call.wait([self._settings.owner, ends[0]])
                code = call.end(reason).exit_code
                answer: Header = {"code": -signal.SIGKILL if code is None else code}
            except (Fault, OSError) as error:
                answer = {"fault": str(error)}
            with suppress(OSError):  # nobody waits for it
                stream.sendall(json.dumps(answer).encode() + b"\n")
        return True


# --- the sandbox's folder ------------------------------------------------------------------------------------


def parts(path: str) -> list[str]:
    """Return the names of a relative path. Raises ValueError for any other."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not names or path.startswith("/") or ".." in names or "\0" in path or path.endswith("/"):
        raise ValueError(f"{path!r} is no path of a file inside the sandbox's folder")
    return names


class Folder:
    """Files of the sandbox's folder, for its owner. No path leaves the folder, no link is followed, nothing is waited
    for. Programs do not run meanwhile, but have made the folder what it is: links, pipes, folders instead of files."""

    def __init__(self, path: str, owner: int | None) -> None:
        """Open it before programs run: later the path may lead elsewhere. `owner`: uid and gid of new files."""
        self.descriptor = os.open(path, _FOLDER)
        self._owner = owner

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file. Raises ValueError for links, OSError."""
        with self._parent(path, make=True) as (folder, name):
            with suppress(FileNotFoundError):
                _check(name, folder, path)
                os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                self._give(descriptor)
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)

    def read(self, path: str, most: int) -> bytes:
        """Return a file. Raises ValueError for links, for what is no file, and for more bytes than `most`; OSError."""
        with self._parent(path, make=False) as (folder, name):
            _check(name, folder, path)
            # without O_NONBLOCK a pipe would be waited for
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_size > most:
                    raise ValueError(f"{path!r} has {found.st_size} bytes, more than {most}")
                if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                    raise ValueError(f"{path!r} is no file")
                with open(descriptor, "rb", closefd=False) as file:  # raises IsADirectoryError
                    return file.read(most)
            finally:
                os.close(descriptor)

    @contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Open the folder that holds the last name of a path; with that name."""
        *folders, name = parts(path)
        here = os.dup(self.descriptor)
        try:
            for folder in folders:
                below = self._open(here, folder, path, make)
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)

    def _open(self, here: int, name: str, path: str, make: bool) -> int:
        made = False
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=here)
                made = True
        _check(name, here, path)
        below = os.open(name, _FOLDER, dir_fd=here)
        if made:
            self._give(below)
        return below

    def _give(self, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)


def _check(name: str, folder: int, path: str) -> None:
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise ValueError(f"{path!r} goes through a link")


# --- the beginning -------------------------------------------------------------------------------------------


def main() -> None:
    """Serve the sandbox that the first argument describes."""
    settings = Settings(**json.loads(sys.argv[1]))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing itself
            if descriptor > 2 and descriptor not in settings.descriptors:
                os.close(descriptor)
            elif descriptor > 2:
                os.set_inheritable(descriptor, False)
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as process 1: never
    if settings.alone and settings.uid is not None:
        for name in WRITABLE_FOLDERS:
            os.chown(f"{WRITABLE}/{name}", settings.uid, settings.uid)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if settings.filter is not None:
        install_filter(settings.filter)
    with suppress(BrokenPipeError, ConnectionResetError):  # the owner has gone
        SandboxWorker(settings).serve()
    os._exit(0)  # at once
