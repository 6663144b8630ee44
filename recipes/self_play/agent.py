"""Agent for episodes with several roles: the policy plays all of them, or some against fixed opponents.

Each role has its own conversation, and therefore its own samples and rewards. Siblings are compared within a role
(asyncrl/algo/table.py), so the winner of a game is never compared with its loser. Simultaneous moves are requested one
after the other, and revealed when all have been made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.agents.chat import Chat
from asyncrl.agents.playing import Player, chat_of, initial_state, messages_of, opened
from asyncrl.envs.env import Step, awaited
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.schema import Generate, Message, Prompt, Trajectory, Turn
from asyncrl_recipes.self_play.opponents import Opponent, opponent


class SelfPlay(Player):
    """Agent that plays until the environment is done, an answer is truncated, or `max_turns` of all roles is reached.

    fixed     opponents by role, which play in place of the policy (opponents.py)
    cut_off   reward of a role whose answer was truncated; the environment does not see that answer. It must not exceed
              the reward of losing, or a losing role would gain by being truncated
    """

    def __init__(
        self,
        environments: EnvironmentPool,
        roles: Sequence[str],
        *,
        fixed: Mapping[str, Mapping[str, Any]] | None = None,
        max_turns: int = 64,
        cut_off: float = -1.0,
    ) -> None:
        """Create the agent. `roles` are all roles of the environment.

        Raises ConfigError when `fixed` leaves no role to the policy or names an unknown one.
        """
        super().__init__(environments, max_turns=max_turns)
        self._cut_off = cut_off
        field, fixed = "agent_params.fixed", fixed or {}
        if not fixed.keys() < set(roles):
            raise ConfigError(
                field, sorted(fixed), f"Must name some of {list(roles)}, and leave at least one to the policy."
            )
        self._fixed = {role: opponent(settings, f"{field}.{role}") for role, settings in fixed.items()}

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode. Every reward belongs to one turn; no reward is shared."""
        async with self._environments() as env:
            table = _Table(prompt, generate, self._fixed)
            role, state = str(prompt.question["role"]), initial_state(prompt.question)
            told = await opened(env, prompt.question)
            for _ in range(self._max_turns):
                answer = await table.ask(role, told, state)
                if answer is None:
                    table.reward({role: self._cut_off})
                    break
                step: Step = await awaited(env.step(answer))
                table.reward(step.rewards)
                if step.done:
                    break
                role, told, state = step.role, messages_of(step.messages), step.state
        return table.trajectory()


class _Table:
    """The conversations of one episode."""

    def __init__(self, prompt: Prompt, generate: Generate, fixed: Mapping[str, Opponent]) -> None:
        self._prompt, self._generate, self._fixed = prompt, generate, fixed
        self._chats: dict[str, Chat] = {}
        self._heard: dict[str, list[Message]] = {role: [] for role in fixed}
        self._order: list[tuple[str, int]] = []  # each turn's role, and its number within the role

    async def ask(self, role: str, told: list[Message], state: str) -> str | None:
        """Return the next answer of a role, or None when it was truncated."""
        if role in self._fixed:
            return await self._ask_fixed(role, told)
        if role in self._chats:
            self._chats[role].say(told)
        else:
            self._chats[role] = chat_of(self._prompt, told, self._generate, role=role)
        chat = self._chats[role]
        self._order.append((role, len(chat.turns)))
        answer = await chat.answer(state=state)
        return None if chat.ended else answer

    async def _ask_fixed(self, role: str, told: list[Message]) -> str:
        heard = self._heard[role]
        heard += told
        answer: str = await awaited(self._fixed[role](list(heard)))
        heard.append({"role": "assistant", "content": answer})
        return answer

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Reward the last turn of each role that the policy plays and that has acted."""
        for role, reward in rewards.items():
            if role in self._chats:
                self._chats[role].reward(reward)

    def trajectory(self) -> Trajectory:
        """Return all turns of the policy in the order of play. Raises EpisodeFailed when there are none."""
        turns: list[Turn] = [self._chats[role].turns[number] for role, number in self._order]
        if not turns:
            raise EpisodeFailed("environment_error", "the episode ended before the policy's first turn")
        return Trajectory(turns, 0.0)
