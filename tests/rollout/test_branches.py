"""Each way of an episode that forks is scored for itself."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from asyncrl.rewards.reward import score_by_branch
from asyncrl.schema import Completion, Trajectory, Turn, VersionSpan


def said(token: int, **turn: object) -> Turn:
    return Turn([], Completion([token], [-0.5], [VersionSpan(0, 0, 1)], "stop"), **turn)  # type: ignore[arg-type]


# 1 and then 2 3, or 4, or 5; and without the 1, 6
TREE = Trajectory(
    [
        said(1, reward=0.5),
        said(2),
        said(3),
        said(4, begins=True, fork=0),
        said(5, begins=True, fork=0),
        said(6, begins=True, fork=-1),
    ]
)


def scored(trajectory: Trajectory) -> tuple[Trajectory, list[list[int]]]:
    """Return scores of a reward that gives the last token, and to each turn the number of turns."""
    asked = []

    async def score(one: Trajectory) -> Trajectory:
        asked.append([turn.completion.token_ids[0] for turn in one.turns])
        assert all(turn.fork is None for turn in one.turns)
        turns = [msgspec.structs.replace(turn, reward=turn.reward + len(one.turns)) for turn in one.turns]
        return Trajectory(turns, float(asked[-1][-1]))

    return asyncio.run(score_by_branch(trajectory, score)), asked


def test_every_way_is_scored_as_if_it_were_all_there_is() -> None:
    found, asked = scored(TREE)
    assert asked == [[1, 2, 3], [1, 4], [1, 5], [6]]
    assert found.reward == 0.0
    rewards = [turn.reward for turn in found.turns]
    assert rewards == pytest.approx([0.5 + (3 + 2 + 2) / 3, 3.0, 3 + 3.0, 2 + 4.0, 2 + 5.0, 1 + 6.0])
    # the mean over ways of what each of them got: 0.5 for the 1, its score, and what its turns got
    ways = [0.5 + 3 + 9, 0.5 + 4 + 4, 0.5 + 5 + 4, 6 + 1]
    assert found.total == pytest.approx(sum(ways[:3]) / 3 / 2 + ways[3] / 2)
    assert [turn.fork for turn in found.turns] == [turn.fork for turn in TREE.turns]


def test_episode_of_one_way_is_scored_as_it_is() -> None:
    found, asked = scored(Trajectory(TREE.turns[:3]))
    assert asked == [[1, 2, 3]]
    assert (found.reward, [turn.reward for turn in found.turns]) == (3.0, [3.5, 3.0, 3.0])
