"""Async scripts of tests, with the processes that environments share closed at their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.extensions.tools.shared import close_shared


def run(script: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            async with asyncio.timeout(60):
                return await script()
        finally:
            await close_shared()

    return asyncio.run(main())
