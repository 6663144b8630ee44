"""Free ports of this host for others to listen on."""

from __future__ import annotations

import random
import socket

from asyncrl.errors import AsyncRLError

# Below Linux's ephemeral range: between the choice and the listening, seconds later, no outgoing connection can take
# one, as happens to ports that the kernel gives (bind to 0).
FIRST_PORT, LAST_PORT = 20000, 32000
ATTEMPTS = 200


def free_ports(host: str, count: int) -> list[int]:
    """Distinct ports that nobody listened on a moment ago. Raises AsyncRLError where `host` is not of this machine."""
    held: list[socket.socket] = []
    try:
        return [_free(host, held) for _ in range(count)]
    finally:
        for one in held:
            one.close()


def free_port(host: str) -> int:
    """One of them."""
    return free_ports(host, 1)[0]


def _free(host: str, held: list[socket.socket]) -> int:
    for _ in range(ATTEMPTS):
        candidate = socket.socket()
        try:
            candidate.bind((host, random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)))
        except OSError:
            candidate.close()
            continue
        held.append(candidate)
        return int(candidate.getsockname()[1])
    raise AsyncRLError(
        f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}: is it an address of this machine (cluster.host)?"
    )
