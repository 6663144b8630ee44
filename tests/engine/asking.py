"""A client against a fake engine, in a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.engine.client import GenerationClient
from asyncrl.schema import Completion
from tests.fakes import FakeEngine

PROMPT = [12, 1, 11]


def asked(
    engine: FakeEngine,
    play: Callable[[GenerationClient], Coroutine[Any, Any, Any]],
    run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
    **settings: Any,
) -> Any:
    """Run `play` against the engine, in the loop that `run` makes."""

    async def main() -> Any:
        client = engine.client(**settings)
        try:
            return await asyncio.wait_for(play(client), 60.0)
        finally:
            await client.close()

    return run(main())


async def siblings(client: GenerationClient, count: int = 1, token_ids: list[int] = PROMPT) -> list[Completion]:
    generate = client.generate()
    return list(await asyncio.gather(*(generate(token_ids) for _ in range(count))))
