"""What an agent is. It reaches the model through `generate` alone: it knows no URL, no engine and no trainer."""

from __future__ import annotations

from typing import Protocol

from asyncrl.imports import load
from asyncrl.types import Generate, Prompt, Trajectory


class Agent(Protocol):
    """Plays one episode of a prompt. The reward is set afterwards. Raises EpisodeFailed when the episode is lost."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory: ...


def load_agent(path: str) -> Agent:
    """The agent at an import path, module:name."""
    agent: Agent = load(path, "rollout.agent")()
    return agent
