"""Agent with slow tools for bench_async.py. Its turns and tool times follow the lengths of the workload."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.planner.lengths import Lengths
from asyncrl.schema import Generate, Prompt, Trajectory, Turn
from scripts.stub_engine import SEPARATOR, number_of

VARIABLE = "BENCH_LENGTHS"


class SlowTools:
    """Agent with slow tools. The first token of an answer tells which sibling it is (scripts/stub_engine.py)."""

    def __init__(self) -> None:
        self._episodes = Lengths(**json.loads(os.environ[VARIABLE])).episodes()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play all turns, each followed by its tool."""
        answer = await generate(prompt.token_ids)
        turns, ids = [Turn([], answer)], [*prompt.token_ids, *answer.token_ids]
        episode = self._episodes(number_of(prompt.token_ids))[answer.token_ids[0]]
        for seconds in episode.seconds:
            await asyncio.sleep(seconds)
            ids.append(SEPARATOR)
            answer = await generate(ids)
            turns.append(Turn([SEPARATOR], answer))
            ids += answer.token_ids
        return Trajectory(turns)
