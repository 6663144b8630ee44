"""An agent that uses only OpenAI's client on the real engine equals the agent written with Chat: token for token,
sample for sample."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from asyncrl.agents.chat import Chat
from asyncrl.agents.template import ChatTemplate
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.proxy.agents import Command, Proxied
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.prompts import load_tokenizer, stop_tokens
from asyncrl.schema import Generate, Prompt, Trajectory
from tests.integration.fleet import START, Engines

SAYS = ("5", "71", "203")
LIMIT = 6  # tokens of an answer; three turns stay within the tiny model's 64
EPISODES = 12

PROGRAM = f"""
import json, sys
from openai import OpenAI

with OpenAI() as client:
    history = json.load(sys.stdin)["messages"]
    for say in {SAYS!r}:
        answer = client.chat.completions.create(model="m", messages=history, max_tokens={LIMIT}).choices[0].message
        history += [answer, {{"role": "user", "content": say}}]
    client.chat.completions.create(model="m", messages=history, max_tokens={LIMIT})
print(json.dumps({{"reward": 0.5}}))
"""


class Direct:
    """Play with Chat."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        chat = Chat.of(prompt, generate)
        await chat.answer(max_new_tokens=LIMIT)
        for say in SAYS:
            chat.say(say)
            await chat.answer(max_new_tokens=LIMIT)
        return chat.trajectory(reward=0.5)


async def solve(question: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with OpenAI's client, partly with streams."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        history: list[Any] = list(question["messages"])
        for number, say in enumerate([*SAYS, ""]):
            ask: dict[str, Any] = {"model": "m", "messages": history, "max_tokens": LIMIT}
            if number % 2:
                events = await client.chat.completions.create(**ask, stream=True, temperature=1.0)
                text = "".join([event.choices[0].delta.content or "" async for event in events])
                history.append({"role": "assistant", "content": text})
            else:
                history.append((await client.chat.completions.create(**ask)).choices[0].message)
            history.append({"role": "user", "content": say})
    return 0.5


async def greedy(fleet: Engines, agent: Agent, episodes: int) -> list[Trajectory]:
    """Return the trajectories of questions 0, 1, ..., all played concurrently."""
    tokenizer = load_tokenizer(fleet.addresses.model, None)
    template = ChatTemplate(tokenizer)
    client = GenerationClient(
        GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 60.0),
        ClientSettings(
            run="proxy",
            max_new_tokens=48,
            temperature=1.0,
            stop_token_ids=stop_tokens(fleet.addresses.model, tokenizer),
            retry_timeout=START,
            coalesce=True,
            context=64,
        ),
    )

    async def play(number: int) -> Trajectory:
        messages = [{"role": "user", "content": f"{number}{number * 7 % 10}"}]
        prompt = Prompt(f"p{number}", template.begin(messages), {"messages": messages}, "t")
        episode = Episode(client.generate(0.0, group=prompt.uid), EpisodeTimeouts(600.0, 600.0, 600.0), template)
        return await episode.play(agent, prompt, no_score)

    try:
        return await asyncio.gather(*map(play, range(episodes)))
    finally:
        await client.close()


async def no_score(trajectory: Trajectory) -> Trajectory:
    raise AssertionError("its agent gives the reward")


def same(found: Trajectory, direct: Trajectory) -> None:
    assert (found.reward, direct.reward) == (0.5, 0.5)
    for one, other in zip(found.turns, direct.turns, strict=True):
        assert (one.observation, one.begins) == (other.observation, other.begins)
        assert one.completion.token_ids == other.completion.token_ids
        assert one.completion.logprobs == pytest.approx(other.completion.logprobs, abs=1e-4)


@pytest.mark.integration
def test_proxied_agents_have_the_trajectories_of_direct_ones(two_engines: Engines, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)

    async def main() -> None:
        direct = await greedy(two_engines, Direct(), EPISODES)
        assert len({tuple(one.turns[-1].completion.token_ids) for one in direct}) > 1
        for agent, episodes in (
            (Proxied("tests.integration.test_proxy:solve"), EPISODES),
            (Command([sys.executable, str(script)], reads_reward=True), 3),
        ):
            found = await greedy(two_engines, agent, episodes)
            for one, other in zip(found, direct[:episodes], strict=True):
                same(one, other)
            assert (agent.figures()["proxy/contexts_begun"], agent.figures()["proxy/turns"]) == (episodes, 4 * episodes)
            await agent.close()

    asyncio.run(main())
