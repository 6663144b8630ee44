"""One server for all tests of a file, in a loop that runs while they do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asyncrl.extensions.proxy.server import Proxy


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def proxy(runner: asyncio.Runner) -> Iterator[Proxy]:
    made = Proxy()

    async def start() -> None:
        made.start()

    runner.run(start())
    yield made
    runner.run(made.close())
