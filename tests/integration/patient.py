"""Agent whose runs use little CPU, for tests that wait for something else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl.schema import Generate, Prompt

SECONDS = 2.0


async def answer(prompt: Prompt, generate: Generate, file: str) -> float:
    """Send one request, delayed by some seconds if the file exists. The tokens are the reward."""
    if await asyncio.to_thread(Path(file).exists):
        await asyncio.sleep(SECONDS)
    completion = await generate(prompt.token_ids)
    return sum(completion.token_ids) % 3 / 2
