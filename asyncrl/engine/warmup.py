"""Warm-up of an engine on a GPU: requests that it answers before its server listens.

The first requests to an engine compile kernels (Triton, FlashInfer), which can take minutes. During that time its
scheduler answers nothing, and the engine would count as hung. SGLang runs the warm-ups named by `--warmups` before it
opens its port, so that the engine is not up yet while it compiles: only engine.start_timeout applies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.importing import after_import

NAME = "asyncrl"
"""Name of the warm-up in SGLang's arguments."""
LENGTHS = (16, 256, 2048)
"""Lengths of the prompts: attention has other kernels for short and for long ones."""
NEW_TOKENS = 8


def install() -> None:
    """Register the warm-up when SGLang's registry is imported."""
    after_import("sglang.srt.entrypoints.warmup", lambda module: module.warmup(NAME)(warm_up))


async def warm_up(_: str, manager: Any) -> None:
    """Answer prompts of several lengths, each once on every data-parallel replica, with the log-probabilities of all
    new and some given tokens; then forget them."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def answer(length: int, replica: int) -> None:
        request = GenerateReqInput(
            input_ids=[1 + (length + replica + place) % 97 for place in range(length)],
            sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=length - NEW_TOKENS,
        )
        async for _ in manager.generate_request(request, None):
            pass

    for length in LENGTHS:
        if length + NEW_TOKENS < manager.context_len:
            await asyncio.gather(*(answer(length, replica) for replica in range(manager.server_args.dp_size)))
    await manager.flush_cache()
