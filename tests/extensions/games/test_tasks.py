"""Games and environments as tasks: a question is an episode's seed and its first observation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.envs.env import EnvSpec
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import ConfigError
from asyncrl.rollout.agent import agents
from asyncrl.tasks.build import build as build_task
from asyncrl.tasks.build import build_all
from tests.fakes import tiny_config

GAMES: dict[str, dict[str, Any]] = {
    "2048": {"kind": "textarena", "name": "2048-v0"},
    "lake": {"kind": "gymnasium", "name": "FrozenLake-v1", "params": {"make": {"is_slippery": False}}},
    "taxi": {"kind": "gymnasium", "name": "Taxi-v4"},
    "digits": {"kind": "asyncrl.extensions.games.higher_lower:HigherLower", "name": "digits"},
}
MATCHES: dict[str, dict[str, Any]] = {
    "tictactoe": {"kind": "textarena", "name": "TicTacToe-v0", "params": {"players": 2}},
}


def config(**settings: Any) -> Any:
    return tiny_config(**{f"task.{name}": value for name, value in {"params": {}, **settings}.items()})


def build(**settings: Any) -> Any:
    return build_task(config(**settings).task)


@pytest.mark.parametrize("name", GAMES)
def test_question_tells_what_the_environment_shows_first(name: str) -> None:
    task = build(**GAMES[name])
    assert (task.size, task.inline) == (None, True)
    for index in (0, 7, 1 << 30):
        question = task.question(index)
        assert question == build(**GAMES[name]).question(index)
        assert question["seed"] == index
        assert question["state"] or name == "2048"
        env = task.environment.make()
        assert not env.reset(question)  # all is told already
        assert env.step("up").messages or name == "digits"


def test_environment_plays_the_game_that_its_question_shows() -> None:
    task = build(**GAMES["2048"])
    env = task.environment.make()
    env.reset(task.question(5))
    task.question(6)  # another game begins meanwhile
    again = task.environment.make()
    again.reset(task.question(5))
    assert [env.step(move) for move in ("up", "left")] == [again.step(move) for move in ("up", "left")]


@pytest.mark.parametrize("name", ["2048", "taxi", "tictactoe"])
def test_system_message_comes_first(name: str) -> None:
    task = build(**(GAMES | MATCHES)[name], system="Be brief.")
    assert [m["role"] for m in task.question(3)["messages"]] == ["system", "user"]
    if name in MATCHES:
        question = task.question(3)
        assert (question["role"], task.environment.make().begin(3).messages) == ("player-0", question["messages"])


class Everyone(MultiTurn):
    """Agent that is told the roles of its environment."""

    def __init__(self, environments: EnvironmentPool, roles: Sequence[str], *, patience: int = 0) -> None:
        super().__init__(environments)
        self.roles = list(roles)


def test_environment_of_one_role_is_played_turn_by_turn() -> None:
    run = config(**GAMES["2048"])
    assert isinstance(agents(run, build_all(run), print)["2048-v0"], MultiTurn)


def test_agent_is_told_the_roles_of_its_environment() -> None:
    run = config(**MATCHES["tictactoe"], agent=f"{__name__}:Everyone")
    agent: Any = agents(run, build_all(run), print)["TicTacToe-v0"]
    assert agent.roles == ["player-0", "player-1"]


def test_environment_of_several_roles_needs_an_agent_of_its_own() -> None:
    run = config(**MATCHES["tictactoe"])
    with pytest.raises(ConfigError, match=r"plays the roles \['player-0', 'player-1'\]") as caught:
        agents(run, build_all(run), print)
    assert caught.value.field == "task.agent"


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({**GAMES["digits"], "agent_params": {"opponents": 1}}, "opponents"),
        ({**MATCHES["tictactoe"], "agent": f"{__name__}:Everyone", "agent_params": {"opponents": 1}}, "opponents"),
        ({**MATCHES["tictactoe"], "agent": "asyncrl.agents.multi_turn:MultiTurn"}, "roles"),
    ],
)
def test_what_an_agent_of_games_does_not_take_is_named(settings: dict[str, Any], wrong: str) -> None:
    run = config(**settings)
    with pytest.raises(ConfigError, match=f"unexpected keyword argument '{wrong}'") as caught:
        agents(run, build_all(run), print)
    assert caught.value.field == "task.agent_params"


@pytest.mark.parametrize(("name", "least"), [("2048", 1.0), ("lake", 0.5)])
def test_solved_is_what_reaches_the_least_reward(name: str, least: float) -> None:
    task = build(**GAMES[name])
    assert (task.correct(least), task.correct(least - 0.01)) == (True, False)
    with pytest.raises(TypeError, match="its environment rewards episodes"):
        task.score("", {})


def test_least_reward_of_an_environment_may_be_set() -> None:
    task = build(kind="gymnasium", name="CliffWalking-v1", params={"solved": -20})
    assert (task.correct(-20.0), task.correct(-21.0)) == (True, False)


@pytest.mark.parametrize("settings", [GAMES["2048"], GAMES["taxi"], MATCHES["tictactoe"]])
def test_environments_can_be_made_in_another_process(settings: dict[str, Any]) -> None:
    task = build(**settings)
    path, params = json.loads(json.dumps([task.environment.path, task.environment.params]))
    here, there = task.environment.make(), EnvSpec(path, params).make()
    for env in (here, there):
        env.reset(json.loads(json.dumps(task.question(1))))
    assert here.step("[0] up west") == there.step("[0] up west")


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"kind": "textarena", "name": "Nope-v0"}, "task.name", "no such game"),
        ({"kind": "textarena", "name": "Nim-v0"}, "task.name", "rejects it for 1 player"),
        ({"kind": "textarena", "name": "Nim-v0", "params": {"players": "2"}}, "task.params.players", "number from 1"),
        ({"kind": "gymnasium", "name": "Nope-v0"}, "task.name", "gymnasium rejects it"),
        ({"kind": "gymnasium", "name": "Taxi-v4", "params": {"colour": 1}}, "task.params", "colour"),
        ({"kind": "gymnasium", "name": "Taxi-v4", "params": {"solved": "1"}}, "task.params.solved", "a number"),
    ],
)
def test_wrong_games_are_refused_before_anything_starts(settings: dict, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        build(**settings)
    assert caught.value.field.startswith(field)
