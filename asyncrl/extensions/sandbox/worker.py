"""The worker: the first process in a sandbox, a small Python process that forks the program of every call.

It runs inside the sandbox (in its own pid namespace it is process 1) and serves its owner, the rollout process, over a
socket (session.py). It imports only the standard library, because nothing else is visible in the sandbox.

Programs cannot harm it. As process 1 it gets no signal from inside, it cannot be traced (not dumpable), it has another
uid if the owner is root, and the system-call filter refuses the remaining ways (seccomp.py). When it ends, the kernel
kills everything in the namespace.

Both directions of the socket carry frames:

    4 bytes length of the header | 4 bytes length of the body | header (JSON object) | body

Programs of a *nested* sandbox can start other programs that cannot reach them: in a second sandbox beside theirs, whose
worker listens at the other end of a socket. The variable BESIDE of their environment holds its descriptor. For each
message

    {"command": [...], "env": {...}}, with descriptors: one end of a stream socket, then what becomes 0, 1, 2, 3, ...

that worker starts a program. It answers on the stream with {"code": exit code, or the signal's negative number} or
{"fault": why the program could not be started}. The program is killed when the other end of the stream is closed. One
program runs at a time.

waits for     requests of its owner; for waits during a call see call.py
on a hang     the owner kills the worker; it ends when the owner's end of the socket is closed
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

from asyncrl.extensions.sandbox.call import Call, Fault
from asyncrl.extensions.sandbox.program import (
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
    """Return a message as bytes."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def receive(connection: socket.socket) -> tuple[Header, bytes] | None:
    """Return the next message of a blocking socket; None if the other end was closed."""
    lengths = connection.recv(LENGTHS.size, socket.MSG_WAITALL)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    data = connection.recv(head + body, socket.MSG_WAITALL)
    return (json.loads(data[:head]), data[head:]) if len(data) == head + body else None


class SandboxWorker:
    """Server of one sandbox's owner."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._owner = socket.socket(fileno=settings.owner)
        self._serves = None if settings.serves is None else socket.socket(fileno=settings.serves)
        self._folder = Folder(settings.folder, settings.uid)

    def serve(self) -> None:
        """Serve until the owner closes its end of the socket."""
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
                if message[0]["do"] != "stop":  # a stop can arrive after its call has ended
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
            receive(self._owner)  # the stop message; the owner sends nothing else during a call
        answer = {"reason": ended.reason, "exit_code": ended.exit_code, "seconds": ended.seconds}
        return {**answer, "split": len(ended.outputs[0])}, b"".join(ended.outputs)

    def _run_beside(self, asked: socket.socket) -> bool:
        """Run a program that the other sandbox requests. Return whether that sandbox still exists."""
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
            with suppress(OSError):  # the requester may have ended
                stream.sendall(json.dumps(answer).encode() + b"\n")
        return True


# --- the sandbox's folder ------------------------------------------------------------------------------------


def parts(path: str) -> list[str]:
    """Return the components of a relative path. Raises ValueError for any other path."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not names or path.startswith("/") or ".." in names or "\0" in path or path.endswith("/"):
        raise ValueError(f"{path!r} is not a relative path of a file inside the sandbox's folder")
    return names


class Folder:
    """Access of the owner to the files of the sandbox's folder.

    No path leaves the folder, links are not followed, and no operation blocks. Programs do not run meanwhile, but may
    have left links, pipes, or folders in place of files.
    """

    def __init__(self, path: str, owner: int | None) -> None:
        """Open the folder before programs run, because they may change where the path leads.

        `owner` is the uid and gid of new files.
        """
        self.descriptor = os.open(path, _FOLDER)
        self._owner = owner

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file. Raises ValueError for links, OSError."""
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
        """Return the content of a file.

        Raises ValueError for links, other non-files and more than `most` bytes; OSError.
        """
        with self._parent(path, make=False) as (folder, name):
            _check(name, folder, path)
            # without O_NONBLOCK, opening a pipe would block
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_size > most:
                    raise ValueError(f"{path!r} has {found.st_size} bytes, more than the limit of {most}")
                if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                    raise ValueError(f"{path!r} is not a regular file")
                with open(descriptor, "rb", closefd=False) as file:  # raises IsADirectoryError
                    return file.read(most)
            finally:
                os.close(descriptor)

    @contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Open the parent folder of a path. Yield its descriptor and the last component of the path."""
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


# --- start ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve the sandbox that the first argument describes."""
    settings = Settings(**json.loads(sys.argv[1]))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself
            if descriptor > 2 and descriptor not in settings.descriptors:
                os.close(descriptor)
            elif descriptor > 2:
                os.set_inheritable(descriptor, False)
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives none
    if settings.alone and settings.uid is not None:
        for name in WRITABLE_FOLDERS:
            os.chown(f"{WRITABLE}/{name}", settings.uid, settings.uid)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if settings.filter is not None:
        install_filter(settings.filter)
    with suppress(BrokenPipeError, ConnectionResetError):  # the owner closed its end
        SandboxWorker(settings).serve()
    os._exit(0)  # without cleanup by the interpreter
