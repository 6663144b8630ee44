"""Access to the servers of a run: the API key that they require, and the authority that signed their certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Access:
    """API key and certificate authority for clients of a run's servers.

    An empty key is not sent. `authority` is the PEM certificate that signed the servers' certificates (tls.py). If it
    is empty, the run's servers have no certificates, and clients do not ask for any.
    """

    key: str
    authority: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @cached_property
    def context(self) -> ssl.SSLContext:
        """TLS context. With an authority it accepts only the run's own servers, at the address that was requested."""
        if not self.authority:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority)
        return context

    @property
    def http(self) -> dict[str, Any]:
        """Arguments for httpx's clients. They ignore the environment's proxies, which are meant for other servers."""
        return {"headers": self.headers, "verify": self.context if self.authority else True, "trust_env": False}
