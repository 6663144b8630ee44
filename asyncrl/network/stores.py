"""Restriction of torch.distributed's stores to one address instead of every interface of the machine.

torch's TCPStore needs no key, and listens on all interfaces whatever its host is. Whoever can reach it can read and
change what ranks tell each other. `bind` makes the stores of this process listen on their host only. That is 127.0.0.1
with cluster=local, and the address of the machine's interface in a job (cluster.interface).
"""

from __future__ import annotations

import socket
import sys
from typing import Any

BACKLOG = 4096
"""Number of ranks that may connect at once."""


def bind() -> None:
    """Make all stores that torch creates in this process from now on listen on their host only.

    This includes the stores of env:// and tcp://, and those of SGLang.
    """

    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package also has a function of that name
    if not isinstance(rendezvous.TCPStore, _Bound):
        rendezvous.TCPStore = _Bound(rendezvous.TCPStore)


class _Bound:
    """Callable that creates stores in place of the TCPStore class."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._ports: set[int] = set()  # ports on which this process serves a store: torch shares it (multi_tenant)

    def __call__(self, host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        """Create a store. Raises OSError if the host is not an address of this machine, or the port is taken."""
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
