"""What agents that play environments have in common: how an episode begins, its turns, and how it is played again.

waits for     the model and the environment, whose pool has deadlines for each call (asyncrl/envs/pool.py)
on a fault    EpisodeFailed, as the pool raises it, or "environment_replay": it does not do the same again
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.agents.chat import Chat
from asyncrl.envs.env import Env, Question, Step
from asyncrl.envs.pool import Environments
from asyncrl.errors import EpisodeFailed
from asyncrl.types import Generate, Message, Prompt


class Player:
    """An agent with environments."""

    def __init__(self, environments: Environments, *, max_turns: int = 32) -> None:
        self._environments, self._max_turns = environments, max_turns

    async def start(self) -> None:
        """Before the first episode."""
        await self._environments.start()

    async def close(self) -> None:
        """After the last one."""
        await self._environments.close()


@dataclass(frozen=True)
class Action:
    """What the model wrote, and what it led to."""

    text: str
    step: Step


async def opened(env: Env, question: Question) -> list[Message]:
    """The chat that an episode begins with."""
    more: Sequence[Message] | None = await awaited(env.reset(question))
    return [*question["messages"], *(more or [])]


def chat_of(prompt: Prompt, messages: Sequence[Message], generate: Generate, *, role: str = "") -> Chat:
    """It goes on from the prompt, if it is the prompt's."""
    if list(messages) == list(prompt.question["messages"]):
        return Chat.of(prompt, generate, role=role)
    return Chat(generate, messages, tools=prompt.question.get("tools", ()), role=role)


async def played(env: Env, chat: Chat, state: str, turns: int) -> list[Action]:
    """Turn after turn until the environment is done, an answer is cut off, or there were so many (1 or more)."""
    found: list[Action] = []
    for _ in range(turns):
        found.append(await acted(env, chat, state))
        if found[-1].step.done or chat.ended:
            break
        chat.say(found[-1].step.messages)
        state = found[-1].step.state
    await finished(env, chat, found[-1].step)
    return found


async def acted(env: Env, chat: Chat, state: str) -> Action:
    """One turn, and its reward."""
    text = await chat.answer(state=state)
    step: Step = await awaited(env.step(text))
    chat.reward(step.reward)
    return Action(text, step)


async def finished(env: Env, chat: Chat, step: Step) -> None:
    """Behind the last turn: what is due where the environment was not done."""
    if not step.done and (finish := getattr(env, "finish", None)):
        chat.reward(await awaited(finish()))


def of_task(actions: Sequence[Action]) -> bool:
    """Whether an episode that ends so is the task's to score."""
    return actions[-1].step.score


async def replayed(env: Env, question: Question, messages: Sequence[Message], actions: Sequence[Action]) -> None:
    """Bring a new environment to where these actions led another. Raises EpisodeFailed where it tells the model
    something else."""
    if await opened(env, question) != list(messages):
        raise EpisodeFailed("environment_replay", "reset told something else than the first time", retry=False)
    for number, action in enumerate(actions):
        step: Step = await awaited(env.step(action.text))
        if _told(step) != _told(action.step):
            told = f"step {number} told {_told(step)!r} in the place of {_told(action.step)!r}"
            raise EpisodeFailed("environment_replay", told, retry=False)


def initial_state(question: Question) -> str:
    """Name of the environment's state before the first turn, for step-level groups: the question's own "state"."""
    return str(question.get("state", ""))


def messages_of(said: Sequence[Message] | str) -> list[Message]:
    """A text is one message of the user's."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with this behind them: in the last one, if it is a text of the user's, for templates want roles to
    take turns."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


async def awaited(result: Any) -> Any:
    """Of a plain method or of an async one."""
    return await result if inspect.isawaitable(result) else result


def _told(step: Step) -> tuple[list[Message], bool, str]:
    return messages_of(step.messages), step.done, step.state
