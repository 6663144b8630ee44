"""A hook into SGLang 0.5.21: an adapter is unloaded as soon as no request has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

POLL_SECONDS = 0.005


def wait_for_requests(module: Any) -> None:
    """Patch TokenizerManager: unloading an adapter waits for the requests that there are, not for a counter.

    SGLang counts the requests of each adapter, and unloads it when the counter is 0. A request with n samples adds n
    and subtracts n + 1, because its prefix is prefilled by a request of its own; one that its client cancels before it
    reaches the scheduler subtracts nothing. The counter is then never 0, and the unload holds its lock for ever, so
    that no other adapter can be loaded. An unload has the deadline of its caller, weights.timeout, after which the
    engine is lost.

    SGLang also keeps n - 1 of the states that it creates for a request with n samples before it sends them; the hook
    deletes them when the request has ended.
    """
    manager_class = module.TokenizerManager
    init, handle = manager_class.init_lora, manager_class._handle_batch_request

    def init_lora(self: Any) -> None:
        init(self)

        async def wait_for_unload(lora_id: str) -> None:
            while any(state.obj.lora_id == lora_id for state in self.rid_to_state.values()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

        self.lora_registry.wait_for_unload = wait_for_unload

    async def handle_batch_request(self: Any, obj: Any, *rest: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(handle(self, obj, *rest)) as responses:
                async for response in responses:
                    yield response
        finally:
            for rid in obj.rid:
                if (state := self.rid_to_state.get(rid)) and not state.dispatched:
                    del self.rid_to_state[rid]

    manager_class.init_lora = init_lora
    manager_class._handle_batch_request = handle_batch_request
