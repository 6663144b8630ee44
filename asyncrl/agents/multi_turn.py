"""An episode in an environment, turn by turn, in one growing context."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from asyncrl.agents.chat import Chat
from asyncrl.envs.env import Env, Step
from asyncrl.envs.pool import Environments
from asyncrl.types import Generate, Message, Prompt, Trajectory


class MultiTurn:
    """Plays until the environment is done, an answer is cut off, or `max_turns`. The reward of an episode is what its
    environment gave, turn by turn, and where that says so (Step.score) the task's score of the last answer."""

    def __init__(self, environments: Environments, *, max_turns: int = 32) -> None:
        self._environments, self._max_turns = environments, max_turns

    async def start(self) -> None:
        """Before the first episode."""
        await self._environments.start()

    async def close(self) -> None:
        """After the last one."""
        await self._environments.close()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One episode."""
        async with self._environments() as env:
            chat, state = await self._begin(env, prompt, generate), str(prompt.question.get("state", ""))
            step = Step()
            for _ in range(self._max_turns):
                text = await chat.answer(state=state)
                step = await awaited(env.step(text))
                chat.reward(step.reward)
                if step.done or chat.ended:
                    break
                chat.say(step.messages)
                state = step.state
            if not step.done and (finish := getattr(env, "finish", None)):
                chat.reward(await awaited(finish()))
            return chat.trajectory(reward=None if step.score else 0.0)

    async def _begin(self, env: Env, prompt: Prompt, generate: Generate) -> Chat:
        more: Sequence[Message] | None = await awaited(env.reset(prompt.question))
        if more:
            tools = prompt.question.get("tools", ())
            return Chat(generate, [*prompt.question["messages"], *more], tools=tools)
        return Chat.of(prompt, generate)


async def awaited(result: Any) -> Any:
    """Of a plain method or of an async one."""
    return await result if inspect.isawaitable(result) else result
