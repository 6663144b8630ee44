"""Access to the servers of a run: the API key that they require, and the certificate authority that
authenticates them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Access:
    """An empty key is not sent. `authority` is the PEM certificate that signed those of the run's servers (tls.py); if
    it is empty, they have none and are trusted without."""

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
        """Arguments for httpx's clients. Proxies named in the environment are ignored: they are meant for other
        servers."""
        return {"headers": self.headers, "verify": self.context if self.authority else True, "trust_env": False}
