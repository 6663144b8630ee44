"""Ways from one context: exact, in environments of their own, and what turn_loo compares."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.algo.samples import build_samples
from asyncrl.algo.table import build_table
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.schema import Completion, Group, Prompt
from asyncrl_recipes.forking.agent import Forking
from tests.agents.talking import Talking, written
from tests.agents.worlds import PROMPT, Sums, play
from tests.algo.tables import advantage

# trunk 2 5 4 (11); from before 5: 7 (9), and 6 1 (9)
TRUNK = [written(2, 10), written(5, 10), written(4, 10)]


def test_branches_go_on_from_the_very_context_of_the_trunk() -> None:
    found, generate = play(partial(Forking, fork_at=[1]), [*TRUNK, written(7, 10)])
    asked = [one.context for one in generate.asked]
    assert asked[1] == asked[3] == [12, 1, 11, 2, 10, 2, 11]
    assert [(turn.fork, turn.begins) for turn in found.turns] == [(None, False)] * 3 + [(0, True)]
    assert [turn.reward for turn in found.turns] == [0.0, 0.0, 11 / 8, 9 / 8]  # its environment had heard of the 2
    assert [turn.state for turn in found.turns] == ["s0", "s2", "s7", "s2"]
    assert found.total == (11 / 8 + 9 / 8) / 2
    assert len(found.samples()) == 2


def test_branches_are_played_to_their_end_at_one_time() -> None:
    found, _ = play(partial(Forking, fork_at=[1], branches=2), [*TRUNK, written(7, 10), written(6, 10), written(1, 10)])
    forks = [turn.fork for turn in found.turns]
    assert forks == [None, None, None, 0, 0, None]
    assert found.parents() == [-1, 0, 1, 0, 0, 4]
    assert [turn.completion.token_ids[0] for turn in found.turns] == [2, 5, 4, 7, 6, 1]
    assert (Sums.made, Sums.most) == (3, 2)  # the trunk's was given back before


def test_ways_from_the_first_turn_and_from_several() -> None:
    found, generate = play(partial(Forking, fork_at=[0, 2]), [*TRUNK, written(9, 10), written(8, 10)])
    assert [turn.fork for turn in found.turns] == [None, None, None, -1, 1]
    assert generate.asked[3].context == PROMPT.token_ids
    assert found.shares() == [1 / 2, 1 / 2, 1 / 4, 1 / 2, 1 / 4]


def test_turns_that_an_episode_does_not_get_to_are_no_forks() -> None:
    for fork_at in ([3, 7], []):
        found, _ = play(partial(Forking, fork_at=fork_at, within=1), TRUNK)
        assert found == play(MultiTurn, TRUNK)[0]


def test_episodes_do_not_hold_up_each_other() -> None:
    found, _ = play(partial(Forking, fork_at=[1], branches=2), [*TRUNK, *[written(7, 10)] * 2], concurrency=1)
    assert len(found.turns) == 5
    assert Sums.most == 1


def test_what_a_reset_tells_stands_in_every_way() -> None:
    found, generate = play(partial(Forking, fork_at=[1]), [*TRUNK, written(7, 10)], hello="4")
    assert generate.asked[1].context == generate.asked[3].context == [12, 1, 4, 11, 2, 10, 2, 11]
    assert [turn.begins for turn in found.turns] == [True, False, False, True]


def test_ways_that_the_task_scores_have_no_reward_yet() -> None:
    found, _ = play(partial(Forking, fork_at=[1], max_turns=2), [*TRUNK[:2], written(6, 10)], scored=0)
    assert (found.reward, [turn.reward for turn in found.turns]) == (None, [0.0, 0.125, 0.125])
    with pytest.raises(ValueError, match="some branches to the task"):
        play(partial(Forking, fork_at=[1]), [*TRUNK, written(7, 10)], scored=10)


@pytest.mark.parametrize(
    ("world", "told"),
    [
        ({"moody": "text"}, "step 0 told .*'3'.* in the place of .*'2'"),
        ({"moody": "state"}, "step 0 told .*'True2'.* in the place of .*'s2'"),
        ({"moody": "end"}, "step 0 told .*True, 's2'.* in the place of .*False, 's2'"),
        ({"late": True, "hello": "4"}, "reset returned something else"),
    ],
)
def test_unrepeatable_environment_costs_the_episode(world: dict[str, object], told: str) -> None:
    with pytest.raises(EpisodeFailed, match=told) as failed:
        play(partial(Forking, fork_at=[1], branches=2), [*TRUNK, *[written(7, 10)] * 2], **world)
    assert (failed.value.reason, failed.value.retry) == ("environment_replay", False)


class Silent(Talking):
    """It never answers what goes beyond."""

    async def __call__(self, token_ids: list[int], **asked: Any) -> Completion:
        if len(self.asked) == len(TRUNK):
            await asyncio.Event().wait()
        return await super().__call__(token_ids, **asked)


def test_way_that_fails_ends_the_others_whatever_they_wait_for() -> None:
    """The one from before 2 waits for an engine, the one from before 5 finds another world."""
    with pytest.raises(EpisodeFailed, match="environment_replay"):
        play(partial(Forking, fork_at=[0, 1]), Silent(TRUNK), moody="text")


def test_turn_to_fork_at_is_drawn_for_the_prompt() -> None:
    def drawn(uid: str) -> list[int | None]:
        prompt = Prompt(uid, PROMPT.token_ids, PROMPT.question, "t")
        answers = [*[written(1, 10)] * 3, *[written(9, 10)] * 5]
        return [turn.fork for turn in play(partial(Forking, within=3), answers, prompt=prompt)[0].turns]

    forks = {uid: tuple(drawn(uid)) for uid in map(str, range(12))}
    assert {fork for one in forks.values() for fork in one if fork is not None} == {-1, 0, 1}
    assert all(tuple(drawn(uid)) == fork for uid, fork in list(forks.items())[:3])


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"branches": 0}, "1 or more"),
        ({"fork_at": [1, 32]}, "from 0 to 31"),
        ({"fork_at": [-1]}, "from 0 to 31"),
        ({"within": 0}, "from 0 to 31"),
    ],
)
def test_forks_that_cannot_be_are_refused(params: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        Forking(None, **params)  # type: ignore[arg-type]
    assert refused.value.field == "agent_params"


def test_turn_loo_compares_ways_and_shows_predecessors() -> None:
    trajectories = [
        play(partial(Forking, fork_at=[1]), [*TRUNK, written(7, 10)])[0],
        play(MultiTurn, [written(9, 10)])[0],
    ]
    group = Group("g", 0, PROMPT.token_ids, trajectories, "t")
    table = build_table([group], 0)
    advantages = advantage("turn_loo")(table)[::2] * 8  # of each turn, two tokens
    # returns 10 11 11 9 and 9, in eighths; behind the fork 11 beside 9, and 9 of the other episode as one more
    assert advantages.tolist() == [1.0, (11 - 9.0) / 2, (11 - 9.0) / 2, (9 - 10.0) / 2, -1.0]
    trunk, branch, other = (sample for sample in build_samples([group])[0])
    assert (branch.prompt_ids, branch.token_ids) == ([12, 1, 11, 2, 10, 2, 11], [7, 10])
    assert [sum(one.mask) for one in (trunk, branch, other)] == [6, 2, 2]
