"""Warm-up of an engine: requests that it answers before its server listens.

The first requests to an engine compile kernels (Triton, FlashInfer), which can take minutes. During that time its
scheduler answers nothing, and the engine would count as hung. SGLang runs the warm-ups named by `--warmups` before it
opens its port, so that the engine is not up yet while it compiles: only engine.start_timeout applies.

The first image takes seconds on a CPU as well, because SGLang imports what it needs then.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.import_hooks import after_import

NAME, IMAGES = "asyncrl", "asyncrl_images"
"""Names of the warm-ups in SGLang's arguments: of engines on GPUs, and of those on CPUs."""
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAKElEQVR42mP8//8/A7UBEwMNwKiho4aOGjpq6Kiho4aO"
    "Gjpq6OAzFADRYgM1sivIJAAAAABJRU5ErkJggg=="
)
"""A white image of 28 x 28 pixels."""
LENGTHS = (16, 256, 2048)
"""Lengths of the prompts: attention has other kernels for short and for long ones."""
NEW_TOKENS = 8


def install() -> None:
    """Register the warm-ups when SGLang's registry is imported."""

    def register(module: Any) -> None:
        module.warmup(NAME)(warm_up)
        module.warmup(IMAGES)(read_image)

    after_import("sglang.srt.entrypoints.warmup", register)


async def warm_up(mode: str, manager: Any) -> None:
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
    await read_image(mode, manager)
    await manager.flush_cache()


async def read_image(mode: str, manager: Any) -> None:
    """Answer a prompt with an image, if the model reads images."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    marks = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = [getattr(manager.model_config.hf_config, mark, None) for mark in marks]
    if None in ids:
        return
    request = GenerateReqInput(
        input_ids=[1, *ids, 1],
        image_data=[PNG],
        sampling_params={"max_new_tokens": 1, "ignore_eos": True},
    )
    async for _chunk in manager.generate_request(request, None):
        pass
