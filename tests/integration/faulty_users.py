"""Agents and a reward of a user that fail where the question's record says so."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.schema import Generate, Prompt, Trajectory
from scripts.slow_tools import SlowTools

RAISES, HANGS = "reward raises", "agent hangs"
"""Faults that a question's record may name."""


def write_questions(path: Path, seed: int, *, raises: float, hangs: float) -> None:
    """Write a thousand questions of three digits. The given fractions of them have faults."""
    choose = random.Random(seed)
    faults = choose.choices([RAISES, HANGS, ""], [raises, hangs, 1 - raises - hangs], k=1000)
    rows = [{"prompt": f"{number:03}", "answer": f"{number:03}", "fault": fault} for number, fault in enumerate(faults)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def _hang_where_told(prompt: Prompt, generate: Generate) -> None:
    if prompt.question["fault"] == HANGS:
        await generate(prompt.token_ids)
        await asyncio.Event().wait()


class OneTurn(SingleTurn):
    """Agent for a real model."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one turn, or hang."""
        await _hang_where_told(prompt, generate)
        return await super().run(prompt, generate)


class Turns(SlowTools):
    """Agent for the stub engine, with as many turns as the workload has."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play all turns, or hang."""
        await _hang_where_told(prompt, generate)
        return await super().run(prompt, generate)


def score(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the first digit was copied, else 0; raise if the record says so."""
    if row["fault"] == RAISES:
        raise KeyError("no reference")
    return float(answer[:1] == row["prompt"][:1])
