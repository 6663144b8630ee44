"""Selection of free ports on this host for servers that start later.

Seconds pass between the selection of a port and the moment its server listens, and another run on the host may select
ports in that time. Therefore a selection is a lease: a file in a folder of the host, which all runs of a user respect
until it expires.
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

# The range is below Linux's ephemeral ports, so that no outgoing connection can take a port before its server listens,
# as happens to ports that the kernel assigns (bind to 0).
FIRST_PORT, LAST_PORT = 20000, 32000
ATTEMPTS = 200
FOLDERS = 100
HOST_TMPDIR = "ASYNCRL_TMPDIR"
"""Environment variable with the temporary folder that all runs share. A run's processes have a TMPDIR of their own."""
LEASE_SECONDS = 600.0
"""Lifetime of a port lease, longer than a server takes to listen."""
REPLICA_PORTS = 14
"""Number of consecutive ports that an engine with replicas of attention needs, from its rendezvous port on. SGLang
0.5.21 uses the first seven and the last (server_args.py: PortArgs, DP_ATTENTION_HANDSHAKE_PORT_DELTA)."""


def free_ports(host: str, count: int) -> list[int]:
    """Return distinct ports on which nobody listens. Raises AsyncRLError if `host` is not an address of this machine.

    No call on this machine has returned any of them within the last LEASE_SECONDS.
    """
    leases = _folder()
    held: list[socket.socket] = []
    try:
        return [_free(host, held, leases) for _ in range(count)]
    finally:
        for one in held:
            one.close()


def free_port(host: str) -> int:
    """Return one free port."""
    return free_ports(host, 1)[0]


def free_block(host: str, count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(ATTEMPTS):
        first = free_port(host)
        held: list[socket.socket] = []
        try:
            for port in range(first + 1, first + count):
                held.append(socket.create_server((host, port)))
                if not _leased(_folder() / str(port)):
                    break
            else:
                return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise AsyncRLError(f"no {count} consecutive free ports between {FIRST_PORT} and {LAST_PORT} on {host}")


def _folder() -> Path:
    """Return this user's lease folder on this machine.

    If another user has created a folder of that name, this is a folder with a number at the end of its name.
    """
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
    raise AsyncRLError(
        f"{folder} and the folders with lower numbers are not private to this user: remove them, or set TMPDIR"
    )


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
    """Try to take the lease. The caller has bound the port, so nobody else examines its lease at the same time."""
    with suppress(FileNotFoundError):
        if time.time() - lease.stat().st_mtime < LEASE_SECONDS:
            return False
        lease.unlink()
    try:
        os.close(os.open(lease, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
