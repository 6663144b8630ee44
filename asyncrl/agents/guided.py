"""A task that failed is tried again with guidance: what a teacher, a test's output or a plan has to say about the
attempt (Agent-RLVR, arXiv 2506.11425).

The paper lets agents try first, has the attempt checked by tests, adds guidance to the ones that failed, lets them try
again, and updates the policy with the rewards of these guided trajectories.

    first attempt     question                | a o b          role ""
    guided            question + guidance     | c o d          role "guided", then "guided2", ...

Here all attempts are trained, each behind the very tokens that it was written behind: guidance is context, and never
trained. Each attempt is a role: it gets its own reward alone, and is compared with the same attempt of siblings. So a
first attempt is not rewarded for what was done with help after it failed, and an attempt with help is no measure for
one without. What the model learns from guided attempts is to follow guidance; to score them without the guidance that
they were written with would be off the policy.

The reward of the whole trajectory, as figures show it, is the sum over attempts: evaluation sets should play MultiTurn.

waits for     the guide, too: rollout.agent_timeout; whatever it raises costs the episode its group
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from asyncrl.agents.playing import (
    Action,
    Player,
    awaited,
    chat_of,
    initial_state,
    messages_of,
    of_task,
    opened,
    played,
    with_text,
)
from asyncrl.envs.env import Question
from asyncrl.envs.pool import Environments
from asyncrl.errors import ConfigError
from asyncrl.imports import load
from asyncrl.types import Generate, Message, Prompt, Trajectory

Guide = Callable[[Question, list[Message]], str | Awaitable[str]]
"""(question, the chat of the failed attempt) -> what to add to the question; nothing where it knows nothing, and then
there is no further attempt. A plain function must not block."""

ROLE = "guided"


class Guided(Player):
    """Up to `tries` more attempts, as long as the last one's reward is below `threshold`; `guide` is the import path of
    a function."""

    def __init__(
        self,
        environments: Environments,
        *,
        guide: str,
        threshold: float = 1.0,
        tries: int = 1,
        max_turns: int = 32,
    ) -> None:
        super().__init__(environments, max_turns=max_turns)
        if tries < 1:
            raise ConfigError("agent_params", {"tries": tries}, "Must be 1 or more: else take MultiTurn.")
        self._guide: Guide = load(guide, "agent_params.guide")
        self._threshold, self._tries = threshold, tries

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One episode: all of its attempts."""
        turns, guidance = [], ""
        for attempt in range(1 + self._tries):
            role = f"{ROLE}{attempt if attempt > 1 else ''}" if attempt else ""
            async with self._environments() as env:
                messages = await opened(env, prompt.question)
                asked = with_text(messages, guidance) if guidance else messages
                chat = chat_of(prompt, asked, generate, role=role)
                actions = await played(env, chat, initial_state(prompt.question), self._max_turns)
            if of_task(actions):
                raise ValueError("the environment leaves the reward to the task (Step.score), and no attempt has one")
            turns += chat.turns
            if attempt == self._tries or sum(turn.reward for turn in chat.turns) >= self._threshold:
                break
            guidance = await awaited(self._guide(prompt.question, _transcript(asked, actions)))
            if not guidance:
                break
        return Trajectory(turns, 0.0)


def _transcript(messages: Sequence[Message], actions: Sequence[Action]) -> list[Message]:
    found = list(messages)
    for action in actions:
        found += [{"role": "assistant", "content": action.text}, *messages_of(action.step.messages)]
    return found
