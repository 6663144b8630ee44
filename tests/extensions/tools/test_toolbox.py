"""Tools by specification: every mistake has its field, and each episode gets what is its own and what is shared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.envs.env import EnvSpec
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.tools.env import ToolEnv
from asyncrl.extensions.tools.toolbox import ToolboxEnv, functions
from asyncrl.schema import Prompt
from tests.agents.talking import Talking, written
from tests.extensions.tools.sandboxes import Folders
from tests.extensions.tools.scripts import run
from tests.fakes import FakeTemplate

OWN = "tests.extensions.tools.own"
SERVER = {"use": "mcp", "command": ["python", str(Path(__file__).parent / "server.py")]}
PYTHON = {"use": "python", "sandbox": "tests.extensions.tools.sandboxes:Folders"}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def told(env: ToolEnv, *texts: str) -> list[str]:
    """Return the result of each text, each in an episode of its own."""
    await env.reset({})
    found = [(await env.step(text)).messages[0]["content"] for text in texts]  # type: ignore[index]
    await env.close()
    return found


def test_each_use_gives_its_tools_and_the_model_is_told_of_all() -> None:
    specs = [{"use": f"{OWN}:double"}, PYTHON, SERVER | {"only": ["echo", "count"]}, {"use": f"{OWN}:Echo"}]
    with pytest.raises(ConfigError, match=r"task.tools: got \['echo'\]. Several tools have this name"):
        functions(specs, "task.tools")
    found = functions(specs[:3])
    assert [one["function"]["name"] for one in found] == ["double", "python", "echo", "count"]
    assert found[0]["function"]["description"] == "Twice a number."

    async def script() -> list[str]:
        env = ToolboxEnv(specs[:3])
        return await told(env, called("double", x=4), called("python", code="6*7"), called("echo", text="hi"))

    Folders.opened.clear()
    assert run(script) == ["8", "42", "hi"]
    assert not Folders.opened[0].path.exists()


def test_tools_can_be_asked_for_where_a_loop_runs() -> None:
    async def script() -> list[Any]:
        return functions([SERVER | {"only": ["pid"]}])

    assert len(run(script)) == 1


def test_class_is_made_per_episode_and_instances_shared() -> None:
    specs = {"class": {"use": f"{OWN}:Counter", "params": {"start": 5}}, "instance": {"use": f"{OWN}:COUNTER"}}

    async def script() -> dict[str, list[str]]:
        found = {}
        for name, spec in (specs | {"server": SERVER | {"only": ["count"]}}).items():
            found[name] = [(await told(ToolboxEnv([spec]), called("count")))[0] for _ in range(2)]
        return found

    assert run(script) == {"class": ["6", "6"], "instance": ["101", "102"], "server": ["1", "2"]}


def test_server_of_each_episode_starts_from_nothing() -> None:
    async def script() -> list[list[str]]:
        spec = SERVER | {"only": ["count"], "per_episode": True}
        return [await told(ToolboxEnv([spec]), called("count"), called("count")) for _ in range(2)]

    assert run(script) == [["1", "2"], ["1", "2"]]


@pytest.mark.parametrize(
    ("spec", "field", "remedy"),
    [
        ({}, "tools.0.use", "Must be python, mcp, or an import path"),
        ({"use": "perl"}, "tools.0.use", "Must be python, mcp, or an import path"),
        ({"use": "python", "sesion": True}, "tools.0", "unknown field `sesion`"),
        ({"use": "python", "seconds": "long"}, "tools.0", "Expected `float | null`, got `str` - at `$.seconds`"),
        ({"use": "python", "sandbox": "no.such:Thing"}, "tools.0.sandbox", "Must be an import path"),
        ({"use": "mcp"}, "tools.0", "an MCP server has a command or a url"),
        ({"use": "mcp", "command": ["x"], "url": "http://x"}, "tools.0", "an MCP server has a command or a url"),
        (SERVER | {"env": {"A": "$NO_SUCH_NAME"}}, "tools.0.env.A", "This environment variable is not set"),
        ({"use": f"{OWN}:nothing"}, "tools.0.use", "Must be an import path"),
        ({"use": f"{OWN}:broken"}, "tools.0.use", "cannot be passed by keyword"),
        ({"use": f"{OWN}:NOTHING"}, "tools.0.use", "it lacks name, description, parameters, call"),
        ({"use": f"{OWN}:Counter", "params": {"end": 1}}, "tools.0.params", "rejects them"),
        ({"use": f"{OWN}:Counter", "timeout": 5.0}, "tools.0.timeout", "applies to functions"),
        ({"use": f"{OWN}:COUNTER", "on_fault": "model"}, "tools.0.on_fault", "sets its own attribute"),
        ({"use": f"{OWN}:double", "params": {"x": 1}}, "tools.0.params", "is not a class and takes no params"),
    ],
)
def test_wrong_specification_is_refused_by_its_field(spec: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        functions([spec])
    assert caught.value.field == field
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("spec", [{"use": "perl"}, {"use": f"{OWN}:broken"}, {"use": "mcp"}])
def test_environment_refuses_it_too_before_an_episode(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tools\.1"):
        ToolboxEnv([{"use": f"{OWN}:double"}, spec])


def test_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "asyncrl.extensions.tools.mcp_tools", None)
    with pytest.raises(ConfigError, match=r"tools.0.use: got 'mcp'. Needs the package mcp, version 2"):
        functions([SERVER])


def test_episode_with_tools_is_left_to_the_task_to_score() -> None:
    """Played as a run plays it: from names alone, in a pool, by MultiTurn."""
    texts = {1: called("double", x=4), 2: "It is 8."}

    class Words(FakeTemplate):
        def extend(self, messages: Sequence[dict[str, Any]], *, last: int | None) -> list[int]:
            assert [message["content"] for message in messages] == ["8"]
            return [20]

    async def script() -> Any:
        spec = EnvSpec("asyncrl.extensions.tools.toolbox:ToolboxEnv", {"tools": [{"use": f"{OWN}:double"}]})
        assert spec.waits  # so it shares the event loop with others
        environments = EnvironmentPool("t", spec)
        prompt = Prompt("p", [12], {"messages": []}, "t")
        generate = Talking([written(1, 10), written(2, 10)], Words(lambda ids: texts[ids[0]]))
        found = await MultiTurn(environments).run(prompt, generate)
        await environments.close()
        return found

    found = run(script)
    assert found.reward is None
    assert [(turn.observation, turn.reward) for turn in found.turns] == [([], 0.0), ([20], 0.0)]


def test_failing_tool_stops_new_episodes_until_it_works() -> None:
    heard: list[str] = []

    async def script() -> None:
        spec = EnvSpec(
            "asyncrl.extensions.tools.toolbox:ToolboxEnv", {"tools": [SERVER | {"only": ["internal", "count"]}]}
        )
        environments = EnvironmentPool("t", spec, PoolSettings(max_failures=2), heard.append)

        async def play(tool: str) -> None:
            async with environments() as env:
                await env.reset({})  # type: ignore[misc]
                await env.step(called(tool))  # type: ignore[misc]

        for _ in range(2):
            with pytest.raises(EpisodeFailed, match="tool: internal: "):
                await play("internal")
        assert "environment t has failed 2 times in a row; episodes wait: tool: internal" in heard[0]
        await play("count")
        assert "works again" in heard[1]
        await environments.close()

    run(script)


def test_options_are_those_of_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"tool_options.format: got 'xml'"):
        ToolboxEnv([], format="xml")
