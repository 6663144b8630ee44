"""An agent that uses only the vendors' clients on the real engine equals the agent written with Chat: token for token,
sample for sample; its stop strings end the engine's answers, which are otherwise the same."""

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
from asyncrl.engine.stop_strings import StopStrings
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.proxy.agents import Command, Proxied
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.rollout.agent import Agent
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.parts import load_tokenizer, stop_tokens
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


async def over_all_apis(question: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one conversation over OpenAI's chats and responses, and over Anthropic's messages."""
    from anthropic import AsyncAnthropic

    async with (
        AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
        AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as other,
    ):
        history: list[Any] = list(question["messages"])
        for number, say in enumerate([*SAYS, ""]):
            messages: Any = {"model": "m", "messages": history, "max_tokens": LIMIT}
            responses: Any = {"model": "m", "input": history, "max_output_tokens": LIMIT, "store": False}
            if number == 0:
                text = (await client.responses.create(**responses)).output_text
            elif number == 1:
                events = await client.responses.create(**responses, stream=True)
                text = "".join([one.delta async for one in events if one.type == "response.output_text.delta"])
            elif number == 2:
                counted = await other.messages.count_tokens(model="m", messages=history)
                async with other.messages.stream(**messages) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    assert (await stream.get_final_message()).usage.input_tokens == counted.input_tokens
            else:
                text = "".join(block.text for block in (await other.messages.create(**messages)).content)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": say}]
    return 0.5


class Stopping:
    """Asks once with OpenAI's client, and with the stop string of the prompt."""

    def __init__(self, stops: dict[str, str]) -> None:
        self._proxy, self._stops = Proxy(), stops
        self.texts: dict[str, str] = {}

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with (
            self._proxy.session(generate) as session,
            AsyncOpenAI(base_url=self._proxy.base_url, api_key=session.key) as client,
        ):
            asked: Any = {"model": "m", "messages": prompt.question["messages"], "stop": self._stops[prompt.uid]}
            choice = (await client.chat.completions.create(**asked)).choices[0]
            assert choice.finish_reason == "stop"
            self.texts[prompt.uid] = choice.message.content or ""
        return session.trajectory(prompt.token_ids, 0.5)

    async def close(self) -> None:
        """Stop the server."""
        await self._proxy.close()


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
            stop=StopStrings([], template.spell),
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
            (Proxied("tests.integration.test_proxy:over_all_apis"), EPISODES),
            (Command([sys.executable, str(script)], reads_reward=True), 3),
        ):
            found = await greedy(two_engines, agent, episodes)
            for one, other in zip(found, direct[:episodes], strict=True):
                same(one, other)
            assert (agent.figures()["proxy/contexts_begun"], agent.figures()["proxy/turns"]) == (episodes, 4 * episodes)
            await agent.close()

    asyncio.run(main())


@pytest.mark.integration
def test_agents_stop_string_ends_the_answer_unchanged(
    two_engines: Engines,
) -> None:
    async def main() -> None:
        tokenizer = load_tokenizer(two_engines.addresses.model, None)
        direct = [one.turns[0].completion for one in await greedy(two_engines, Direct(), EPISODES)]
        spelled = [[tokenizer.decode([token]) for token in one.token_ids] for one in direct]
        stops = {f"p{number}": "".join(pieces[2:4]) for number, pieces in enumerate(spelled)}
        agent = Stopping(stops)
        found = await greedy(two_engines, agent, EPISODES)
        for number, (one, other, pieces) in enumerate(zip(found, direct, spelled, strict=True)):
            stop = stops[f"p{number}"]
            kept = next(end for end in range(1, len(pieces) + 1) if stop in "".join(pieces[:end]))
            (turn,) = one.turns
            assert turn.completion.token_ids == other.token_ids[:kept]
            assert turn.completion.logprobs == pytest.approx(other.logprobs[:kept], abs=1e-4)
            assert turn.completion.finish_reason == "stop"
            assert agent.texts[f"p{number}"] == "".join(pieces[:kept]).partition(stop)[0]
        assert any(len(turn.completion.token_ids) < LIMIT for one in found for turn in one.turns)
        await agent.close()

    asyncio.run(main())
