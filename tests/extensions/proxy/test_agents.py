"""Functions and programs that know the OpenAI API alone: their rewards, their failures, and their ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from asyncrl.agents.linking import check
from asyncrl.errors import ConfigError, EngineError, EpisodeFailed
from asyncrl.extensions.proxy.agents import Command, Proxied
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.schema import Generate, Prompt, Trajectory
from tests.agents.talking import Talking, dead, written
from tests.extensions.proxy.behind import ASKS, BOS_ID, DEADLINE, EOS_ID, PAIR, Blocking, Raising, soon, template, user
from tests.fakes import FakeEngine, echo

PROMPT = Prompt("p", [BOS_ID, 1, ASKS], {"messages": [user("1")], "answer": "34"}, "t")
SECRET = "ASYNCRL_TEACHER_API_KEY"


async def solve(question: dict[str, Any], base_url: str, api_key: str, ends: str = "returns") -> float | None:
    """Asks twice, and knows whether it was right."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        history: list[Any] = question["messages"]  # which it changes
        for _ in range(2):
            answer = (await client.chat.completions.create(model="m", messages=history)).choices[0].message
            history += [answer, user("12")]
        reward = float(history[1].content + history[3].content == question["answer"])
        if ends == "posts":
            await client.post("/reward", body={"reward": reward, "turn": 1}, cast_to=object)
            await client.post("/reward", body={"reward": -1}, cast_to=object)
    if ends == "raises":
        raise KeyError("by hand")
    return reward if ends == "returns" else None


def not_async(question: dict[str, Any], base_url: str, api_key: str) -> float:
    return 0.0


PROGRAM = """
import json, os, sys, urllib.request

question = json.load(sys.stdin)
history = question["messages"]


def post(route, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + route
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


for _ in range(2):
    history.append(post("/chat/completions", {"messages": history})["choices"][0]["message"])
    history.append({"role": "user", "content": "12"})
"""


def answers() -> Talking:
    return Talking([written(3, EOS_ID), written(4, EOS_ID)], template())


def play(make: Callable[[], Any], generate: Generate) -> Trajectory:
    async def main() -> Trajectory:
        agent = make()
        await agent.start()
        try:
            async with asyncio.timeout(DEADLINE):
                return await agent.run(PROMPT, generate)
        finally:
            await agent.close()

    return asyncio.run(main())


def proxied(ends: str = "returns") -> Callable[[], Proxied]:
    return lambda: Proxied("tests.extensions.proxy.test_agents:solve", params={"ends": ends})


def command(code: str, tmp_path: Path, **options: Any) -> Callable[[], Command]:
    script = tmp_path / "agent.py"
    script.write_text(code)
    return lambda: Command([sys.executable, str(script)], **options)


# --- functions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "reward", "of_turns"), [("returns", 1.0, [0, 0]), ("posts", -1.0, [0, 1]), ("none", None, [0, 0])]
)
def test_function_is_rewarded_as_it_says(ends: str, reward: float | None, of_turns: list[float]) -> None:
    generate = answers()
    found = play(proxied(ends), generate)
    assert (found.reward, [turn.reward for turn in found.turns]) == (reward, of_turns)
    assert [turn.observation for turn in found.turns] == [[], [PAIR, ASKS]]
    check(found, PROMPT.token_ids, generate.asked)


def test_function_that_raises_is_heard() -> None:
    with pytest.raises(KeyError, match="by hand"):
        play(proxied("raises"), answers())


@pytest.mark.parametrize("error", [EngineError("no engine is left")])
def test_failed_engine_is_named_before_the_agents_error(error: Exception, tmp_path: Path) -> None:
    for make in (proxied(), command(PROGRAM, tmp_path)):
        with pytest.raises(EngineError, match="no engine is left"):
            play(make, Raising(error))


def test_episodes_share_a_server_that_starts_with_the_first() -> None:
    async def main() -> None:
        agent = proxied()()
        found = await asyncio.gather(*(agent.run(PROMPT, answers()) for _ in range(8)))
        assert [one.reward for one in found] == [1.0] * 8
        assert (agent.figures()["proxy/turns"], agent.figures()["proxy/contexts_begun"]) == (16, 8)
        await agent.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"agent": "tests.extensions.proxy.test_agents:not_async"}, "agent_params.agent: .* Must be an async function"),
        ({"agent": "tests.extensions.proxy.test_agents:nothing"}, "agent_params.agent: .* Must be an import path"),
        (
            {"agent": "tests.extensions.proxy.test_agents:solve", "params": {"x": 1}},
            "agent_params.params: .* rejects them",
        ),
        (
            {"agent": "tests.extensions.proxy.test_agents:solve", "tool_format": "x"},
            "agent_params.tool_format: .* Must be one of",
        ),
    ],
)
def test_settings_of_a_function_are_checked_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Proxied(**options)


# --- in an episode ------------------------------------------------------------------------------------------


def played(make: Callable[[], Any], temperature: float, **limits: float) -> Trajectory:
    """Return the episode that the real client plays with an engine that always answers 0 1 2, trained at temperature
    0.5."""

    async def main() -> Trajectory:
        agent, client = make(), FakeEngine(echo(3)).client(temperature=0.5)
        options: dict[str, Any] = {"agent": DEADLINE, "reward": DEADLINE, "episode": DEADLINE} | limits
        episode = Episode(client.generate(temperature), EpisodeTimeouts(**options), template())
        try:
            return await episode.play(agent, PROMPT, no_score)
        finally:
            await agent.close()
            await client.close()

    return asyncio.run(main())


async def no_score(trajectory: Trajectory) -> Trajectory:
    raise AssertionError("its agent gives the reward")


async def at(question: dict[str, Any], base_url: str, api_key: str, temperature: float) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = question["messages"]
        await client.chat.completions.create(model="m", messages=messages, temperature=temperature)
    return 1.0


def asking_at(temperature: float) -> Callable[[], Proxied]:
    return lambda: Proxied("tests.extensions.proxy.test_agents:at", params={"temperature": temperature})


@pytest.mark.parametrize("drawn", [0.5, 0.0, 0.8])
def test_agent_may_name_its_training_temperature(drawn: float) -> None:
    assert played(asking_at(0.5), drawn).turns[0].completion.token_ids == [0, 1, 2]
    with pytest.raises(EpisodeFailed, match=r"agent_error: .* rollout\.temperature is 0\.5"):
        played(asking_at(1.0), drawn)


def test_program_that_asks_for_nothing_is_given_up(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    with pytest.raises(EpisodeFailed, match="agent_timeout"):
        played(command(code, tmp_path), 0.5, agent=0.5)
    if told.exists() and (pid := told.read_text()):  # it had come to its first line
        asyncio.run(dead(int(pid)))


# --- programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "options", "reward"),
    [
        ("", {}, None),
        ('post("/reward", {"reward": 2})', {}, 2.0),
        ('print("well"); print(json.dumps({"reward": 0.5}))', {"reads_reward": True}, 0.5),
        ('post("/reward", {"reward": 2}); print(json.dumps({"reward": 0.5}))', {}, 2.0),
    ],
)
def test_program_is_rewarded_as_it_says(
    tmp_path: Path, rest: str, options: dict[str, Any], reward: float | None
) -> None:
    generate = answers()
    found = play(command(PROGRAM + rest, tmp_path, **options), generate)
    assert (found.reward, len(found.samples()), len(found.turns)) == (reward, 1, 2)
    check(found, PROMPT.token_ids, generate.asked)


@pytest.mark.parametrize(
    ("rest", "options", "told"),
    [
        ("raise KeyError('by hand')", {}, "agent_error: .* exited with status 1: .*\n.*KeyError: 'by hand'"),
        ("os.abort()", {}, "agent_error: .* was killed by SIGABRT: "),
        ("print('well')", {"reads_reward": True}, "agent_error: its last line is no .*: b'well'"),
        ('print(json.dumps({"reward": "NaN"}))', {"reads_reward": True}, "agent_error: its last line is no"),
        ("print('[' * 60_000)", {"reads_reward": True}, "agent_error: its last line is no"),
        ("", {"reads_reward": True}, "agent_error: its last line is no .*: b''"),
    ],
)
def test_program_that_fails_costs_its_episode(tmp_path: Path, rest: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(EpisodeFailed, match=f"(?s){told}") as failed:
        play(command(PROGRAM + rest, tmp_path, **options), answers())
    assert failed.value.reason == "agent_error"


def test_program_is_ended_with_its_episode(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os; open({str(told)!r}, 'w').write(str(os.getpid()))\n{PROGRAM}"

    async def main() -> None:
        agent, generate = command(code, tmp_path)(), Blocking()
        playing = asyncio.create_task(agent.run(PROMPT, generate))
        await soon(generate.entered)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await soon(generate.cancelled)
        await dead(int(told.read_text()))
        await agent.close()

    asyncio.run(main())


def test_program_has_the_environment_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "x")
    monkeypatch.setenv("ASYNCRL_RUN_ID", "run0")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    told = tmp_path / "env"
    code = f"import json, os; json.dump(dict(os.environ), open({str(told)!r}, 'w'))\n{PROGRAM}"
    play(command(code, tmp_path, env={"MINE": "1"}), answers())
    found = json.loads(told.read_text())
    assert SECRET not in found
    assert found["NO_PROXY"] == found["no_proxy"] == "example.org,127.0.0.1"
    assert (found["ASYNCRL_RUN_ID"], found["MINE"]) == ("run0", "1")
    assert found["OPENAI_BASE_URL"] == f"{found['ANTHROPIC_BASE_URL']}/v1"
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"]
    assert found["PATH"] == f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"argv": "python x.py"}, "agent_params.argv: .* Must be a list"),
        ({"argv": []}, "agent_params.argv: .* Must be a list"),
        ({"argv": ["x"], "cwd": "/no/such/folder"}, "agent_params.cwd: .* Must be a folder"),
    ],
)
def test_settings_of_a_program_are_checked_when_it_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Command(**options)
