"""Agent that retries a failed task with guidance (Agent-RLVR, arXiv 2506.11425).

    first attempt     question                | a o b          role ""
    guided            question + guidance     | c o d          role "guided", then "guided2", ...

Each attempt is trained in the exact context in which it was generated, and is a role: it gets only its own reward, and
is compared with the same attempt of its siblings. README.md gives the reasons.

waits for     the model and the environment; the guide (rollout.agent_timeout)
on an error   when the guide fails, the episode's group is lost
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from asyncrl.agents.playing import (
    Action,
    Player,
    chat_of,
    initial_state,
    messages_of,
    of_task,
    opened,
    played,
    with_text,
)
from asyncrl.envs.env import Question, awaited
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import ConfigError
from asyncrl.schema import Generate, Message, Prompt, Trajectory
from asyncrl.user_code import load

Guide = Callable[[Question, list[Message]], str | Awaitable[str]]
"""Function of the question and the chat of the failed attempt that returns the text to add to the question. An empty
text means that there is no guidance, and ends the attempts. A function that is not async must not block."""

ROLE = "guided"


class Guided(Player):
    """Agent that makes up to `tries` more attempts while the last one's reward is below `threshold`.

    `guide` is the import path of a Guide function.
    """

    def __init__(
        self,
        environments: EnvironmentPool,
        *,
        guide: str,
        threshold: float = 1.0,
        tries: int = 1,
        max_turns: int = 32,
    ) -> None:
        super().__init__(environments, max_turns=max_turns)
        if tries < 1:
            raise ConfigError("agent_params", {"tries": tries}, "Must be 1 or more; for 0 use MultiTurn.")
        self._guide: Guide = load(guide, "agent_params.guide")
        self._threshold, self._tries = threshold, tries

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode with all of its attempts."""
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
