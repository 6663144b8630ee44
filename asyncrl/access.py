"""What a process needs to speak to the servers of its run: the key that they ask for, and how they prove to be ours."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Access:
    """An empty key is not sent. `authority`: the certificate, in PEM, that has signed those of the run's servers
    (tls.py); empty: they have none, and are trusted as they are."""

    key: str
    authority: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @cached_property
    def context(self) -> ssl.SSLContext:
        """In which a server of https:// is accepted: the run's own alone, at the address that it was asked at."""
        if not self.authority:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority)
        return context

    @property
    def http(self) -> dict[str, Any]:
        """Arguments of httpx's clients. A proxy that the environment names is for other servers than the run's."""
        return {"headers": self.headers, "verify": self.context if self.authority else True, "trust_env": False}
