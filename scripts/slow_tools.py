"""Parts of bench_async.py: an agent with slow tools, whose turns and tool times follow the lengths of the workload, and
dynamic sampling that rejects a fraction of the groups."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.schema import Generate, Group, Prompt, Trajectory, Turn
from scripts.stub_engine import SEPARATOR, number_of

VARIABLE, REJECTED = "BENCH_LENGTHS", "BENCH_REJECTED"


def accepted(number: int, rejected: float) -> bool:
    """Return whether the group of a question is accepted, where a fraction is `rejected`."""
    return random.Random(f"accept {number}").random() >= rejected


def accept(group: Group) -> bool:
    """rollout.accept of the benchmark."""
    return accepted(number_of(group.prompt_ids), float(os.environ[REJECTED]))


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
