"""The hook into SGLang's unloading of adapters, on a class with the parts of its tokenizer manager that it touches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from asyncrl.extensions.lora.hooks import wait_for_requests


def state(lora_id: str, *, dispatched: bool) -> Any:
    return SimpleNamespace(obj=SimpleNamespace(lora_id=lora_id), dispatched=dispatched)


class Manager:
    """Creates a state for each sample of a request, sends others, and counts nothing."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.ending = asyncio.Event()
        self.init_lora()

    def init_lora(self) -> None:
        self.lora_registry: Any = SimpleNamespace()

    async def _handle_batch_request(self, obj: Any, request: Any = None) -> AsyncIterator[str]:
        for rid in obj.rid:
            self.rid_to_state[rid] = state("a", dispatched=False)
        self.rid_to_state["sent"] = state("a", dispatched=True)
        yield "first"
        await self.ending.wait()
        yield "last"


def test_unload_waits_for_requests_and_leaves_no_state() -> None:
    wait_for_requests(SimpleNamespace(TokenizerManager=Manager))

    async def play() -> None:
        manager, seen = Manager(), []

        async def request() -> None:
            seen.extend([one async for one in manager._handle_batch_request(SimpleNamespace(rid=["r0", "r1"]))])

        requesting = asyncio.ensure_future(request())
        await asyncio.sleep(0)
        await asyncio.wait_for(manager.lora_registry.wait_for_unload("b"), 30.0)
        unloading = asyncio.ensure_future(manager.lora_registry.wait_for_unload("a"))
        manager.ending.set()
        await requesting
        assert seen == ["first", "last"]
        assert set(manager.rid_to_state) == {"sent"}  # SGLang deletes it with its last chunk
        await asyncio.sleep(0.02)
        assert not unloading.done()
        del manager.rid_to_state["sent"]
        await asyncio.wait_for(unloading, 30.0)

        manager.ending.clear()
        cancelled = asyncio.ensure_future(request())
        await asyncio.sleep(0)
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        assert set(manager.rid_to_state) == {"sent"}

    asyncio.run(play())
