"""Agent that plays an episode to its end, and then plays additional branches that start at some of its turns.

It is meant for advantage=turn_loo, which compares branches that start from the same context.

    trunk      P | a o b o c
    branches   P a o | d o e,  P a o | f        fork_at=1, branches=2

A branch has its own environment, in which the trunk's actions are replayed up to the fork. If its observations differ
from the trunk's, EpisodeFailed("environment_replay") is raised. The fork turns are chosen before the episode begins,
because choosing them by its outcome would bias the gradient (asyncrl/extensions/turns/advantage.py).

waits for     environments, but never for one while it holds another, so that episodes cannot deadlock
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from asyncrl.agents.chat import Chat
from asyncrl.agents.playing import (
    Action,
    Player,
    chat_of,
    initial_state,
    messages_of,
    of_task,
    opened,
    played,
)
from asyncrl.envs.env import Env, Question, Step, awaited
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.schema import Generate, Message, Prompt, Trajectory, Turn

Way = tuple[list[Turn], list[Action]]


class Forking(Player):
    """Agent that plays `branches` additional branches from before each of the turns `fork_at` that an episode reaches.

    The first turn is turn 0. Without `fork_at`, the agent forks before one of the first `within` turns, which is drawn
    for each prompt and is the same for all siblings.
    """

    def __init__(
        self,
        environments: EnvironmentPool,
        *,
        max_turns: int = 32,
        fork_at: Sequence[int] | None = None,
        within: int = 4,
        branches: int = 1,
    ) -> None:
        super().__init__(environments, max_turns=max_turns)
        self._fork_at, self._within, self._branches = fork_at, within, branches
        if branches < 1:
            raise ConfigError("agent_params", {"branches": branches}, "Must be 1 or more; for 0 use MultiTurn.")
        outside = [turn for turn in fork_at or [within - 1] if not 0 <= turn < max_turns]
        if outside:
            params = {"within": within} if fork_at is None else {"fork_at": list(fork_at)}
            raise ConfigError("agent_params", params, f"Turns are numbered from 0 to {max_turns - 1} (max_turns).")

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode, the trunk first."""
        async with self._environments() as env:
            messages = await opened(env, prompt.question)
            chat = chat_of(prompt, messages, generate)
            actions = await played(env, chat, initial_state(prompt.question), self._max_turns)
        forks = [turn for turn in self._forks(prompt) if turn < len(actions) for _ in range(self._branches)]
        branches = await _together(self._branch(prompt, chat, messages, actions[:turn]) for turn in forks)
        scored = {of_task(actions), *(of_task(more) for _, more in branches)}
        if len(scored) > 1:
            raise ValueError(
                "the environment leaves the reward of some branches to the task (Step.score), but not of all"
            )
        return Trajectory([*chat.turns, *(turn for way, _ in branches for turn in way)], None if scored.pop() else 0.0)

    def _forks(self, prompt: Prompt) -> Sequence[int]:
        if self._fork_at is not None:
            return self._fork_at
        return [random.Random(prompt.uid).randrange(self._within)]

    async def _branch(self, prompt: Prompt, chat: Chat, messages: list[Message], actions: list[Action]) -> Way:
        turn = len(actions)
        async with self._environments() as env:
            await _replay(env, prompt.question, messages, actions)
            branch = chat.branch(turn)
            more = await played(env, branch, chat.turns[turn].state, self._max_turns - turn)
        return branch.turns, more


async def _replay(env: Env, question: Question, messages: Sequence[Message], actions: Sequence[Action]) -> None:
    """Replay actions in a new environment, to bring it to the state of another one.

    Raises EpisodeFailed when its observations differ from the recorded ones.
    """
    if await opened(env, question) != list(messages):
        raise EpisodeFailed("environment_replay", "reset returned something else than the first time", retry=False)
    for number, action in enumerate(actions):
        step: Step = await awaited(env.step(action.text))
        if _told(step) != _told(action.step):
            told = f"step {number} told {_told(step)!r} in the place of {_told(action.step)!r}"
            raise EpisodeFailed("environment_replay", told, retry=False)


def _told(step: Step) -> tuple[list[Message], bool, str]:
    return messages_of(step.messages), step.done, step.state


async def _together(works: Iterable[Coroutine[Any, Any, Way]]) -> list[Way]:
    """Run all coroutines concurrently and return their results in order.

    When one fails, cancel the others and wait for them before its error is raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
