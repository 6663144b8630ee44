"""Waiting for what other processes and threads do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """AssertionError when it does not hold within so many seconds."""
    end = time.monotonic() + seconds
    for _ in iter(lambda: time.monotonic() < end, False):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("never happened")
