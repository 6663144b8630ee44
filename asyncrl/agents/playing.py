"""Common parts of agents that play environments: the start of an episode and its turns.

waits for     the model and the environment, whose pool has deadlines for each call (asyncrl/envs/pool.py)
on a fault    EpisodeFailed from the pool
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.agents.chat import Chat
from asyncrl.envs.env import Env, Question, Step, awaited
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.schema import Generate, Message, Prompt


class Player:
    """Base class of agents that play environments."""

    def __init__(self, environments: EnvironmentPool, *, max_turns: int = 32) -> None:
        self._environments, self._max_turns = environments, max_turns

    async def start(self) -> None:
        """Start the environments. This is called before the first episode."""
        await self._environments.start()

    async def close(self) -> None:
        """Close the environments. This is called after the last episode."""
        await self._environments.close()


@dataclass(frozen=True)
class Action:
    """A text of the model, and the environment's step that followed it."""

    text: str
    step: Step


async def opened(env: Env, question: Question) -> list[Message]:
    """Reset the environment and return the messages with which the episode begins."""
    more: Sequence[Message] | None = await awaited(env.reset(question))
    return [*question["messages"], *(more or [])]


def chat_of(prompt: Prompt, messages: Sequence[Message], generate: Generate, *, role: str = "") -> Chat:
    """Return a chat that starts with these messages. If they are the prompt's own, it reuses the prompt's token ids."""
    if list(messages) == list(prompt.question["messages"]):
        return Chat.of(prompt, generate, role=role)
    return Chat(generate, messages, tools=prompt.question.get("tools", ()), role=role)


async def played(env: Env, chat: Chat, state: str, turns: int) -> list[Action]:
    """Play until the environment is done, an answer is truncated, or `turns` (1 or more) is reached."""
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
    """Play one turn and record its reward."""
    text = await chat.answer(state=state)
    step: Step = await awaited(env.step(text))
    chat.reward(step.reward)
    return Action(text, step)


async def finished(env: Env, chat: Chat, step: Step) -> None:
    """Add the reward of the environment's `finish`, if it has one and the episode ended before it was done."""
    if not step.done and (finish := getattr(env, "finish", None)):
        chat.reward(await awaited(finish()))


def of_task(actions: Sequence[Action]) -> bool:
    """Return whether the last step leaves the score of the episode to the task."""
    return actions[-1].step.score


def initial_state(question: Question) -> str:
    """Return the question's "state": the name of the state before the first turn, for step-level groups."""
    return str(question.get("state", ""))


def messages_of(said: Sequence[Message] | str) -> list[Message]:
    """Return a list of messages; a text becomes one user message."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a text to messages. It joins the last one if that is a user's, since templates want alternating roles."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
