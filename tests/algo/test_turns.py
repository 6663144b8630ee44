"""Ways through the turns of an episode: what is at an end, and what follows what."""

from __future__ import annotations

import pytest

from asyncrl.algo.table import build_table
from asyncrl.schema import Group, Trajectory, Turn
from tests.fakes import completion


@pytest.mark.parametrize("ways", [1, 3, 7, 10, 49])
def test_episode_reward_comes_at_the_end_of_its_ways(ways: int) -> None:
    """The sum is exact, whatever the number of shares."""
    trunk = [Turn([], completion()), Turn([5], completion())]
    branches = [Turn([7], completion(), begins=True, fork=0) for _ in range(ways - 1)]
    table = build_table([Group("g", 0, [12, 11], [Trajectory([*trunk, *branches], 3.0)], "t")], 0)
    turns = table.turns
    assert turns.parent.tolist() == [-1, *[0] * ways]
    assert turns.turn_rewards().tolist() == [0.0, *[3.0] * ways]
    assert turns.to_go(turns.turn_rewards(), 1.0).tolist() == pytest.approx([3.0] * (1 + ways), rel=1e-12)
