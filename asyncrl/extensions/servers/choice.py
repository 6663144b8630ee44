"""The choice among equivalent servers: a request whose server failed moves to another one at once, and waits when all
of them have failed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.retries import pause

REST_SECONDS = 5.0
"""Time for which a server that has failed is chosen last."""


class EquivalentServers:
    """Servers of which any may answer the requests of one event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Create the choice. No server has failed yet."""
        self.urls = [url.rstrip("/") for url in urls]
        self._failed_at: dict[str, float] = {}

    def pick(self, preference: Callable[[str], Any]) -> str:
        """Return the server with the smallest preference.

        Servers that failed recently are chosen last; among them, the one whose failure is the oldest comes first.
        """
        now = asyncio.get_running_loop().time()

        def rank(url: str) -> tuple[float, Any]:
            failed = self._failed_at.get(url, -math.inf)
            return failed if now - failed < REST_SECONDS else -math.inf, preference(url)

        return min(self.urls, key=rank)

    async def failed(self, url: str, failures: int) -> None:
        """Record a request's `failures`-th failure. Pause if every server has failed since the last pause."""
        self._failed_at[url] = asyncio.get_running_loop().time()
        if failures % len(self.urls) == 0:
            await pause(failures // len(self.urls) - 1)
