"""Several roles in one episode: each has samples, siblings and rewards of its own; opponents are not trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from asyncrl.agents.linking import check
from asyncrl.algo.table import build_table
from asyncrl.config import load
from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.rollout.agent import agents
from asyncrl.schema import Completion, Group, Prompt, Trajectory
from asyncrl.tasks.build import build_all
from asyncrl_recipes.self_play.agent import SelfPlay
from tests.agents.talking import Talking, written
from tests.fakes import compose_values

QUESTION = {"messages": [{"role": "user", "content": "0"}], "turns": "010", "role": "player-0", "state": "s0"}
PROMPT = Prompt("p", [12, 0, 11], QUESTION, "t")
ROLES = ("player-0", "player-1", "judge")


class Table:
    """Game whose question says who acts. Each player is told the number of turns so far, and the last one wins."""

    heard: ClassVar[list[str]] = []
    ended: ClassVar[list[str]] = []

    def reset(self, question: dict[str, Any]) -> None:
        self._turns = question["turns"]
        self.heard.clear()

    def step(self, action: str) -> Step:
        self.heard.append(action)
        place = len(self.heard)
        if place == len(self._turns):
            last = f"player-{self._turns[-1]}"
            return Step(rewards={role: 1.0 if role == last else -1.0 for role in ROLES}, done=True)
        role = f"player-{self._turns[place]}"
        return Step(str(place), role=role, rewards={"player-0": 0.25}, state=f"s{place}")

    def close(self) -> None:
        self.ended.append(self._turns)


def play(*answers: Completion, turns: str = "010", **options: Any) -> tuple[Trajectory, Talking, list[str]]:
    """The trajectory, what was asked for it, and what the environment heard."""

    async def main() -> tuple[Trajectory, Talking]:
        generate = Talking(answers)
        prompt = Prompt("p", PROMPT.token_ids, {**QUESTION, "turns": turns, "role": f"player-{turns[0]}"}, "t")
        environments = EnvironmentPool("table", EnvSpec(f"{__name__}:Table"), PoolSettings(hosted=False))
        try:
            return await SelfPlay(environments, ROLES, **options).run(prompt, generate), generate
        finally:
            await environments.close()

    Table.ended.clear()
    try:
        return *asyncio.run(main()), list(Table.heard)
    finally:
        assert Table.ended == [turns]


def test_each_role_has_a_conversation_of_its_own() -> None:
    found, generate, heard = play(written(3, 10), written(4, 10), written(5, 10))
    assert heard == ["3", "4", "5"]
    assert [(turn.role, turn.begins, turn.observation, turn.state) for turn in found.turns] == [
        ("player-0", False, [], "s0"),  # it goes on from the prompt
        ("player-1", True, [12, 1, 11], "s1"),
        ("player-0", False, [2, 11], "s2"),
    ]
    assert [one.role for one in generate.asked] == ["player-0", "player-1", "player-0"]
    check(found, PROMPT.token_ids, generate.asked)


def test_rewards_go_to_the_last_turn_of_their_role() -> None:
    found, *_ = play(written(3, 10), written(4, 10), written(5, 10))
    # 0.25 for player-0 after each turn but the last, whoever's that was; then 1 for who made it, and -1
    assert [turn.reward for turn in found.turns] == [0.5, -1.0, 1.0]
    assert (found.reward, found.totals()) == (0.0, {"player-0": 1.5, "player-1": -1.0})


def test_role_that_has_not_moved_has_no_turn_and_no_reward() -> None:
    found, *_ = play(written(3, 10), written(4, 10), turns="00")
    assert found.totals() == {"player-0": 1.25}


def test_siblings_are_compared_role_by_role() -> None:
    both, *_ = play(written(3, 10), written(4, 10), turns="01")
    alone, *_ = play(written(3, 10), written(4, 10), turns="00")
    table = build_table([Group("g", 0, PROMPT.token_ids, [both, alone, both], "t")], version=1)
    assert table.group.tolist() == [0, 1, 0, 0, 1]
    totals = table.reward + table.sum_per_episode(table.token_reward)
    assert totals.tolist() == [-0.75, 1.0, 1.25, -0.75, 1.0]


def test_turns_end_at_their_limit() -> None:
    found, *_ = play(*[written(3, 10)] * 5, turns="01010", max_turns=3)
    assert len(found.turns) == 3
    assert [turn.reward for turn in found.turns] == [0.5, 0.0, 0.25]  # nobody has won


def test_who_is_cut_off_loses_and_is_not_heard() -> None:
    found, _, heard = play(written(3, 10), written(4, finish="length"), cut_off=-2.0)
    assert [turn.reward for turn in found.turns] == [0.25, -2.0]
    assert heard == ["3"]


# --- opponents ----------------------------------------------------------------------------------------------


def scripted(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return in one line what a player was told and answered."""
    return ",".join(f"{message['role'][0]}{message['content']}" for message in messages)


async def slowly(messages: Sequence[Mapping[str, Any]]) -> str:
    await asyncio.sleep(0)
    return scripted(messages)


def wrong(_: Sequence[Mapping[str, Any]]) -> str:
    raise KeyError("no such move")


@pytest.mark.parametrize("name", ["scripted", "slowly"])
def test_opponent_sees_its_conversation_and_is_not_trained(name: str) -> None:
    fixed = {"player-0": {"function": f"{__name__}:{name}"}}
    found, generate, heard = play(written(4, 10), turns="010", fixed=fixed)
    assert heard == ["u0", "4", "u0,au0,u2"]
    assert [(turn.role, turn.reward) for turn in found.turns] == [("player-1", -1.0)]
    check(found, PROMPT.token_ids, generate.asked)


def test_policy_that_was_never_asked_has_no_episode() -> None:
    with pytest.raises(EpisodeFailed, match="environment_error: the episode ended before the policy's first turn"):
        play(turns="0", fixed={"player-0": {"function": f"{__name__}:scripted"}})


def test_opponent_that_raises_costs_the_episode() -> None:
    with pytest.raises(KeyError, match="no such move"):
        play(turns="0", fixed={"player-0": {"function": f"{__name__}:wrong"}})


@pytest.mark.parametrize(
    ("fixed", "field", "remedy"),
    [
        ({"player-7": {"function": f"{__name__}:scripted"}}, "fixed", r"Must name some of \['player-0', 'player-1'"),
        ({role: {"function": f"{__name__}:scripted"} for role in ROLES}, "fixed", "leave at least one to the policy"),
        ({"judge": {"function": "nowhere:it"}}, "fixed.judge.function", "Must be an import path"),
        ({"judge": {"model": "m"}}, "fixed.judge", r"Must be \{function: module:name\}, or \{base_url"),
    ],
)
def test_wrong_opponents_name_field_and_remedy(fixed: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        SelfPlay(EnvironmentPool("table", EnvSpec(f"{__name__}:Table"), PoolSettings(hosted=False)), ROLES, fixed=fixed)
    assert caught.value.field == f"agent_params.{field}"


@pytest.mark.parametrize(
    ("params", "remedy"),
    [
        ({"fixed": {"player-2": {"function": "asyncrl_recipes.self_play.nim:nim_expert"}}}, "Must name some of"),
        ({"opponents": 1}, "unexpected keyword argument 'opponents'"),
    ],
)
def test_wrong_parameters_of_the_experiment_are_refused(params: dict[str, Any], remedy: str) -> None:
    values = compose_values("experiment=self_play")
    values["task"]["agent_params"] = params
    run = load(values)
    with pytest.raises(ConfigError, match=remedy) as caught:
        agents(run, build_all(run), print)
    assert caught.value.field.startswith("agent_params" if "fixed" in params else "task.agent_params")


def test_one_role_of_the_evaluation_set_is_an_expert() -> None:
    """Its opponent is fixed, and the policy plays the other role alone."""
    run = load(compose_values("experiment=self_play"))
    found = agents(run, build_all(run), print)
    assert {name: type(agent) for name, agent in found.items()} == {"nim": SelfPlay, "nim_expert": SelfPlay}
    assert run.eval_sets["nim_expert"].agent_params["fixed"].keys() == {"player-1"}
    assert not run.mixture["nim"].agent_params
