"""Free ports of this host for others to listen on.

Between the choice and the listening lie seconds, in which another run of the host may choose: so a choice is a lease, a
file in the host's own folder for such, which all runs of a user heed until it is too old.
"""

from __future__ import annotations

import os
import random
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import AsyncRLError

# Below Linux's ephemeral range: between the choice and the listening, seconds later, no outgoing connection can take
# one, as happens to ports that the kernel gives (bind to 0).
FIRST_PORT, LAST_PORT = 20000, 32000
ATTEMPTS = 200
FOLDERS = 100
HOST_TMPDIR = "ASYNCRL_TMPDIR"
"""Environment variable of a run's processes, whose TMPDIR is their own: the folder that all runs share."""
LEASE_SECONDS = 600.0
"""Longer than a server takes to listen."""


def free_ports(host: str, count: int) -> list[int]:
    """Distinct ports that nobody listened on a moment ago, nor was given by this function on this machine since
    LEASE_SECONDS. Raises AsyncRLError where `host` is not of this machine."""
    leases = _folder()
    held: list[socket.socket] = []
    try:
        return [_free(host, held, leases) for _ in range(count)]
    finally:
        for one in held:
            one.close()


def free_port(host: str) -> int:
    """One of them."""
    return free_ports(host, 1)[0]


def _folder() -> Path:
    """This user's, on this machine. Another user may have made one of that name: then it is the next."""
    for number in range(FOLDERS):
        folder = Path(
            os.environ.get(HOST_TMPDIR) or tempfile.gettempdir(),
            f"asyncrl-ports-{os.getuid()}" + (f"-{number}" if number else ""),
        )
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    raise AsyncRLError(f"{folder} and all before it are not this user's alone: remove them, or set TMPDIR")


def _free(host: str, held: list[socket.socket], leases: Path) -> int:
    for _ in range(ATTEMPTS):
        candidate = socket.socket()
        port = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)
        try:
            candidate.bind((host, port))
        except OSError:
            candidate.close()
            continue
        held.append(candidate)
        if _leased(leases / str(port)):
            return port
    raise AsyncRLError(
        f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}: is it an address of this machine (cluster.host)?"
    )


def _leased(lease: Path) -> bool:
    """Whether it is ours now. Meanwhile we hold the port itself: nobody else looks at its lease."""
    with suppress(FileNotFoundError):
        if time.time() - lease.stat().st_mtime < LEASE_SECONDS:
            return False
        lease.unlink()
    try:
        os.close(os.open(lease, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
