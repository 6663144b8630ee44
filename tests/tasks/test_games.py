"""Games and environments as tasks: a question is an episode's seed and its first observation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl import tasks
from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.agents.self_play import SelfPlay
from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.rollout.agent import agents
from tests.fakes import tiny_config

GAMES: dict[str, dict[str, Any]] = {
    "2048": {"kind": "textarena", "name": "2048-v0"},
    "lake": {"kind": "gymnasium", "name": "FrozenLake-v1", "params": {"make": {"is_slippery": False}}},
    "taxi": {"kind": "gymnasium", "name": "Taxi-v4"},
    "digits": {"kind": "asyncrl.envs.toys:HigherLower", "name": "digits"},
}
MATCHES: dict[str, dict[str, Any]] = {
    "tictactoe": {"kind": "textarena", "name": "TicTacToe-v0", "params": {"players": 2}},
    "nim": {"kind": "asyncrl.envs.toys:Nim", "name": "nim"},
}


def config(**settings: Any) -> Any:
    return tiny_config(**{f"task.{name}": value for name, value in {"params": {}, **settings}.items()})


def build(**settings: Any) -> Any:
    return tasks.build(config(**settings).task)


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


@pytest.mark.parametrize("name", MATCHES)
def test_several_roles_are_played_by_self_play_and_one_by_itself(name: str) -> None:
    for settings, kind in ((MATCHES[name], SelfPlay), (GAMES["2048"], MultiTurn)):
        run = config(**settings)
        played = agents(run, tasks.build_all(run), print)
        assert isinstance(played[settings["name"]], kind)


def test_agents_of_games_take_agent_params_and_name_wrong_ones() -> None:
    run = config(**MATCHES["nim"], agent_params={"fixed": {"player-2": {"function": "asyncrl.envs.toys:nim_expert"}}})
    with pytest.raises(ConfigError, match=r"Must name some of \['player-0', 'player-1'\]"):
        agents(run, tasks.build_all(run), print)
    run = config(**MATCHES["nim"], agent_params={"opponents": 1})
    with pytest.raises(ConfigError, match="opponents") as caught:
        agents(run, tasks.build_all(run), print)
    assert caught.value.field == "task.agent_params"


@pytest.mark.parametrize(("name", "least"), [("2048", 1.0), ("lake", 0.5)])
def test_solved_is_what_reaches_the_least_reward(name: str, least: float) -> None:
    task = build(**GAMES[name])
    assert (task.correct(least), task.correct(least - 0.01)) == (True, False)
    with pytest.raises(TypeError, match="rewards its own episodes"):
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
        ({"kind": "textarena", "name": "Nim-v0"}, "task.name", "refuses it for 1 player"),
        ({"kind": "textarena", "name": "Nim-v0", "params": {"players": "2"}}, "task.params.players", "number from 1"),
        ({"kind": "gymnasium", "name": "Nope-v0"}, "task.name", "gymnasium refuses"),
        ({"kind": "gymnasium", "name": "Taxi-v4", "params": {"colour": 1}}, "task.params", "colour"),
        ({"kind": "gymnasium", "name": "Taxi-v4", "params": {"solved": "1"}}, "task.params.solved", "a number"),
    ],
)
def test_wrong_games_are_refused_before_anything_starts(settings: dict, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        build(**settings)
    assert caught.value.field.startswith(field)
