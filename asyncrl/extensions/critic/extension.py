"""What this folder adds: a critic, and the advantage estimator that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncrl import extension
from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.errors import ConfigError
from asyncrl.settings import Natural, Positive, Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.trainer.policy import Policy


class CriticSettings(Section):
    """Critic of algo.advantage=gae."""

    path: str | None = None
    """HF folder that the critic is initialized from, with the policy's architecture; unset: model.path."""
    lr: Positive = 1e-5
    """Peak learning rate."""
    warmup: Natural = 0
    """Number of initial batches that only train the critic."""
    value_clip: Positive | None = 0.2
    """Clip range of the value loss, the largest change of a value in one step; unset: no clipping."""


class CriticLaunch(extension.LaunchHooks):
    """The check of the policy's model."""

    def __init__(self, settings: CriticSettings) -> None:
        self._settings = settings

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Refuse a critic that would read images with another vision tower than its own."""
        from asyncrl.models.families import family_of

        if self._settings.path and family_of(model).tower:
            remedy = "The critic sees with the policy's vision tower: unset it, or choose a text model."
            yield ConfigError("critic.path", self._settings.path, remedy)


class CriticExtension(extension.Extension):
    """The section critic, and algo.advantage=gae."""

    Settings = CriticSettings
    advantages = {"gae": "asyncrl.extensions.critic.value:gae"}  # noqa: RUF012
    metrics = {  # noqa: RUF012
        "critic/loss": "loss of the critic",
        "critic/grad_norm": "gradient norm of the critic before clipping",
        "critic/skipped": "1 if the critic's update was not applied, otherwise 0",
        "critic/explained_variance": "1 - Var(returns - values) / Var(returns), before the update",
        "critic/value": "mean predicted value before the update",
    }

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return CriticLaunch(self.settings)

    def trainer(self, policy: Policy) -> extension.TrainerHooks:
        """Return the critic, if the advantage estimator needs values."""
        if not ADVANTAGES.find(policy.config.algo.advantage).traits.critic:
            return extension.TrainerHooks()
        from asyncrl.extensions.critic.critic import Critic

        return Critic(self.settings, policy)


Own = CriticExtension
