"""What this folder adds: three rewards, and a judge with engines of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl import extension
from asyncrl.config import AuxiliaryModelConfig, Config

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses
    from asyncrl.rollout.reporters import Warn

OWN_FLEET = "ASYNCRL_JUDGES"
"""Environment variable with the addresses of the run's own judge."""
AUTHORITY = "ASYNCRL_AUTHORITY"
"""Environment variable with the certificate that signed those of its engines."""


class JudgeConfig(AuxiliaryModelConfig):
    """A frozen model on its own engines that serves as a judge: task.reward=judge queries it, unless its
    reward_params.urls names other servers (docs/rewards.md)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments for reading and writing text through the OpenAI API."""
        return {"skip_tokenizer_init": False, "served_model_name": "judge"}


class JudgeLaunch(extension.LaunchHooks):
    """Where the judge's engines are, for the processes that build rewards."""

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return the process with their addresses in its environment, unless it is an engine, the router or a trainer.
        The rewards of a task, which may ask them, are built before any hook is called there."""
        urls = addresses.frozen.get("judge")
        if not urls or spec.watch or spec.together:
            return spec
        fleet = " ".join(f"{url}/v1" for url in urls)
        return replace(spec, env={**spec.env, OWN_FLEET: fleet, AUTHORITY: addresses.authority})


class JudgeHooks(extension.PlayerHooks):
    """The judge's engines in a process that plays episodes."""

    def __init__(self, addresses: Any) -> None:
        self._addresses = addresses

    async def start(self, timeout: float, warn: Warn) -> None:
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

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return JudgeLaunch()

    def player(self, config: Config, addresses: Any) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return JudgeHooks(addresses) if addresses.frozen.get("judge") else extension.PlayerHooks()


Own = Judges
