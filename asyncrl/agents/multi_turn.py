"""Agent that plays an environment turn by turn in one growing context."""

from __future__ import annotations

from asyncrl.agents.playing import Player, chat_of, initial_state, of_task, opened, played
from asyncrl.schema import Generate, Prompt, Trajectory


class MultiTurn(Player):
    """Agent that plays until the environment is done, an answer is truncated, or `max_turns` is reached.

    The reward of an episode is the sum of its environment's rewards, plus the task's score of the last answer if the
    environment requests it (Step.score).
    """

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with self._environments() as env:
            chat = chat_of(prompt, await opened(env, prompt.question), generate)
            actions = await played(env, chat, initial_state(prompt.question), self._max_turns)
        return chat.trajectory(reward=None if of_task(actions) else 0.0)
