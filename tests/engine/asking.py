"""A client against a fake engine, in a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.engine.client import GenerationClient
from asyncrl.schema import Completion
from tests.fakes import FakeEngine, Reply, completion, pieces, stream

RANK = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 1,
    "num_used_tokens": 500,
    "max_total_num_tokens": 1000,
    "total_prefill_uncached_tokens": 900,
    "total_prefill_busy_us": 2_500_000,
}
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


def answering(*, label: int = 9, before: Callable[[int], Reply | None] = lambda number: None) -> FakeEngine:
    """Return an engine that serves a later version than any request names. `before` may give the n-th reply."""

    def answer(request: dict[str, Any]) -> Reply:
        reply = before(len(engine.requests) - 1)
        told = [completion(3, (label,), "length") for _ in range(request["sampling_params"]["n"])]
        return reply or stream(event for i, one in enumerate(told) for event in pieces(one, index=i))

    engine = FakeEngine(answer)
    return engine


def named(engine: FakeEngine) -> list[str | None]:
    return [request.get("lora_path") for request in engine.requests]
