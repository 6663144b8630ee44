"""Scoring of an episode with branches: each branch is scored as if it were the whole episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from asyncrl.schema import Trajectory


async def score_by_branch(trajectory: Trajectory, score: Callable[[Trajectory], Awaitable[Trajectory]]) -> Trajectory:
    """Score every branch and combine the results. The last turn of a branch receives the branch's reward; the rewards
    of turns are averaged over the branches that pass through them. Branches are scored one after the other, each with
    its own timeout."""
    ways = trajectory.ways()
    if len(ways) == 1:
        return await score(trajectory)
    turns, shares = list(trajectory.turns), trajectory.shares()
    for way in ways:
        alone = Trajectory([msgspec.structs.replace(trajectory.turns[place], fork=None) for place in way])
        found = await score(alone)
        assert found.reward is not None
        for place, before, after in zip(way, alone.turns, found.turns, strict=True):
            more = (after.reward - before.reward) * shares[way[-1]] / shares[place]
            more += found.reward if place == way[-1] else 0.0
            turns[place] = msgspec.structs.replace(turns[place], reward=turns[place].reward + more)
    return Trajectory(turns, 0.0)
