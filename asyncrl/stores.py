"""Where the ranks of torch.distributed find each other: at one address, not on every interface of the machine.

torch's TCPStore asks nobody for a key, and listens on all interfaces whatever its host is called. Who can reach it can
read and change what ranks tell each other. `bind` has the stores of this process listen at their host alone: at
127.0.0.1 with cluster=local, in a job at the address of the machine's interface (cluster.interface).
"""

from __future__ import annotations

import socket
import sys
from typing import Any

BACKLOG = 4096
"""Ranks that may knock at once."""


def bind() -> None:
    """For the stores that torch makes from now on in this process, by env:// and tcp://, ours and SGLang's."""

    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    if not isinstance(rendezvous.TCPStore, _Bound):
        rendezvous.TCPStore = _Bound(rendezvous.TCPStore)


class _Bound:
    """Makes stores, as the class does in whose place it stands."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._ports: set[int] = set()  # where this process serves one: torch shares it (multi_tenant)

    def __call__(self, host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        """Raises OSError where the host is no address of this machine, or the port is taken."""
        if is_master and port not in self._ports:
            options["master_listen_fd"] = _listening(host_name, port)
            self._ports.add(port)
        return self._plain(host_name, port, *arguments, is_master=is_master, **options)


def _listening(host: str, port: int) -> int:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG).detach()
    except OSError as error:
        raise OSError(error.errno, f"a store of torch cannot listen at {host}:{port}: {error.strerror}") from None
