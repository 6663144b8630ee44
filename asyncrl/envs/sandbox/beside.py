"""Programs beside a guest: at its word they are started in its sandbox, where they cannot reach it.

A guest of a sandbox that is `nested` has a socket, whose descriptor is BESIDE in its environment. To each message

    {"command": [...], "env": {...}}, with descriptors: one end of a stream socket, then what becomes 0, 1, 2, 3, ...

a program is started in the sandbox's folder, in a process namespace of its own where the kernel gives one, under
another uid where the machine has one to give: so it can neither signal nor stop nor trace the guest. Over the stream
comes {"code": exit code, the signal's negative number} or {"fault": why it could not be started}; the guest ends the
program by closing its end, or by ending.

waits for     the guest's messages; of each program its end, or that of the stream
on a hang     the sandbox's own limits end all of it
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from asyncrl.envs.sandbox import linux
from asyncrl.envs.sandbox.guest import Confinement, become
from asyncrl.envs.sandbox.processes import kill_descendants

BESIDE = "ASYNCRL_BESIDE"
PROCESSES = 3
"""Of ours, beside the guest's: this one, and two for each program."""
_MESSAGE, _DESCRIPTORS = 65536, 16


def serve(guest: socket.socket, confinement: Confinement, home: int) -> NoReturn:
    """Of a forked supervisor: start what the guest at the other end asks for, until that has closed its end."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
        confinement = replace(confinement, uid=confinement.beside, gid=confinement.uid)
        while True:
            data, ends, _, _ = socket.recv_fds(guest, _MESSAGE, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if not data:
                os._exit(0)
            if os.fork() == 0:
                guest.close()
                _watch(json.loads(data), ends, confinement, home)
            for end in ends:
                os.close(end)
    finally:
        os._exit(1)


def _watch(order: dict[str, Any], ends: Sequence[int], confinement: Confinement, home: int) -> NoReturn:
    """Start the program, and end it with the stream."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        stream = socket.socket(fileno=ends[0])
        _leave_namespace(confinement)
        first = os.fork()
        if first == 0:
            _start(order, stream, ends[1:], confinement, home)
        for end in ends[1:]:
            os.close(end)
        poll, alive = select.poll(), os.pidfd_open(first)
        poll.register(stream, select.POLLIN | select.POLLRDHUP)
        poll.register(alive, select.POLLIN)
        poll.poll()
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        while kill_descendants(os.getpid()):
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)
        os._exit(0)
    finally:
        os._exit(1)


def _leave_namespace(confinement: Confinement) -> None:
    """What is forked from now on begins a process namespace, if the kernel gives any. A program with another uid does
    without: it cannot reach the guest either."""
    for flags in (linux.CLONE_NEWPID, linux.CLONE_NEWUSER | linux.CLONE_NEWPID):
        if flags & linux.CLONE_NEWUSER and confinement.uid is not None:
            return  # it would have no such uid
        with suppress(OSError):
            linux.unshare(flags)
            return


def _start(
    order: dict[str, Any], stream: socket.socket, ends: Sequence[int], confinement: Confinement, home: int
) -> NoReturn:
    """The first process of the namespace, if there is one: it takes the program's orphans along."""
    try:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        told, fault = os.pipe()
        program = os.fork()
        if program == 0:
            become(confinement, home, order["command"], order["env"], ends, fault)
        for end in (fault, *ends):
            os.close(end)
        why = os.read(told, _MESSAGE).decode(errors="replace")  # ends when the program has begun
        while (ended := os.waitpid(-1, 0))[0] != program:
            pass
        answer = {"fault": why} if why else {"code": os.waitstatus_to_exitcode(ended[1])}
        stream.sendall(json.dumps(answer).encode() + b"\n")
        os._exit(0)
    finally:
        os._exit(1)
