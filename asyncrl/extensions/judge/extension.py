"""What this folder adds: three rewards, and a judge with engines of its own."""

from __future__ import annotations

from typing import Any

from asyncrl import extension
from asyncrl.config import AuxiliaryModelConfig, Config


class JudgeConfig(AuxiliaryModelConfig):
    """A frozen model on its own engines that serves as a judge: task.reward=judge queries it, unless its
    reward_params.urls names other servers (docs/rewards.md)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments for reading and writing text through the OpenAI API."""
        return {"skip_tokenizer_init": False, "served_model_name": "judge"}


class JudgeHooks(extension.PlayerHooks):
    """The judge's engines in a process that plays episodes."""

    def __init__(self, addresses: Any) -> None:
        self._addresses = addresses

    async def start(self, timeout: float) -> None:
        """Wait until they are healthy."""
        from asyncrl.extensions.judge.judge import wait_until_healthy

        await wait_until_healthy(self._addresses.frozen["judge"], self._addresses.access, timeout)


class Judges(extension.Extension):
    """Other models score the answers."""

    Settings = JudgeConfig
    rewards = {  # noqa: RUF012
        "remote": "asyncrl.extensions.judge.remote:RewardModel",
        "judge": "asyncrl.extensions.judge.judge:JudgeReward",
        "rubric": "asyncrl.extensions.judge.rubric:RubricReward",
    }

    def player(self, config: Config, addresses: Any) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return JudgeHooks(addresses) if addresses.frozen.get("judge") else extension.PlayerHooks()


Own = Judges
