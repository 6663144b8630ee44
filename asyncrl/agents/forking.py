"""An episode that is played to its end, and then again from some of its turns on: for advantage=turn_loo, which
compares the ways that begin in one context.

    trunk      P | a o b o c
    branches   P a o | d o e,  P a o | f        fork_at=1, branches=2

A branch has an environment of its own, which is brought to the fork by the trunk's own actions and must tell the model
the same again: EpisodeFailed("environment_replay") where it does not. Where to fork is settled before the episode
begins; to choose turns by how it went would bias what is learnt (algo/credit.py).

waits for     environments: never for one while it has another, so that episodes cannot hold each other up
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from asyncrl.agents.chat import Chat
from asyncrl.agents.playing import Action, Player, chat_of, initial_state, of_task, opened, played, replayed
from asyncrl.envs.pool import Environments
from asyncrl.errors import ConfigError
from asyncrl.types import Generate, Message, Prompt, Trajectory, Turn

Way = tuple[list[Turn], list[Action]]


class Forking(Player):
    """`branches` more ways to go on from before each of the turns `fork_at` (0 is the first) that an episode gets to;
    or, without these, from before one of the first `within` turns, drawn for each prompt, the same for all siblings."""

    def __init__(
        self,
        environments: Environments,
        *,
        max_turns: int = 32,
        fork_at: Sequence[int] | None = None,
        within: int = 4,
        branches: int = 1,
    ) -> None:
        super().__init__(environments, max_turns=max_turns)
        self._fork_at, self._within, self._branches = fork_at, within, branches
        if branches < 1:
            raise ConfigError("agent_params", {"branches": branches}, "Must be 1 or more: else take MultiTurn.")
        outside = [turn for turn in fork_at or [within - 1] if not 0 <= turn < max_turns]
        if outside:
            params = {"within": within} if fork_at is None else {"fork_at": list(fork_at)}
            raise ConfigError("agent_params", params, f"Turns are numbered from 0 to {max_turns - 1} (max_turns).")

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One episode, its trunk first."""
        async with self._environments() as env:
            messages = await opened(env, prompt.question)
            chat = chat_of(prompt, messages, generate)
            actions = await played(env, chat, initial_state(prompt.question), self._max_turns)
        forks = [turn for turn in self._forks(prompt) if turn < len(actions) for _ in range(self._branches)]
        branches = await _together(self._branch(prompt, chat, messages, actions[:turn]) for turn in forks)
        scored = {of_task(actions), *(of_task(more) for _, more in branches)}
        if len(scored) > 1:
            raise ValueError("the environment leaves the reward of some ways to the task (Step.score), not of all")
        return Trajectory([*chat.turns, *(turn for way, _ in branches for turn in way)], None if scored.pop() else 0.0)

    def _forks(self, prompt: Prompt) -> Sequence[int]:
        if self._fork_at is not None:
            return self._fork_at
        return [random.Random(prompt.uid).randrange(self._within)]

    async def _branch(self, prompt: Prompt, chat: Chat, messages: list[Message], actions: list[Action]) -> Way:
        turn = len(actions)
        async with self._environments() as env:
            await replayed(env, prompt.question, messages, actions)
            branch = chat.branch(turn)
            more = await played(env, branch, chat.turns[turn].state, self._max_turns - turn)
        return branch.turns, more


async def _together(works: Iterable[Coroutine[Any, Any, Way]]) -> list[Way]:
    """All at once, in their order; where one fails the others are ended before that is heard."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
