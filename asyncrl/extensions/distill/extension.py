"""What this folder adds: a teacher with its engines, its scores of every token, and what is learned from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from asyncrl import extension
from asyncrl.config import AuxiliaryModelConfig, Config
from asyncrl.errors import ConfigError
from asyncrl.settings import NonNegative, Positive, Section, Share

if TYPE_CHECKING:
    from asyncrl.launch.prepare import Preparation


class DistillSettings(Section):
    """On-policy distillation from a teacher (teacher.model)."""

    coefficient: NonNegative = 0.0
    """Coefficient of the KL to the teacher; 0: off. With algo.advantage=none it is the only training signal."""
    place: Literal["advantage", "loss"] = "advantage"
    """Subtract the KL from the advantage of each token, where it is subject to clipping, or add it to the token's loss
    with the estimator `ratio` (algo/kl.py). Without clipping and discount, both have the same gradient."""
    discount: Share = 0.0
    """With place=advantage: each token is credited with its own difference to the teacher and those of later tokens,
    discounted by this per token; 0: only with its own."""


class TeacherConfig(AuxiliaryModelConfig):
    """A frozen model on its own engines that scores the log-probability of each token of an episode, for distillation
    (distill.coefficient) or as the reference of the KL (algo.kl.reference). It must have the tokenizer of model.path,
    and no episode may be longer than the KV caches of its engines."""

    urls: list[str] = Field(default_factory=list)
    """Engines that already serve the teacher elsewhere; empty: this run starts `count`. Their API key comes from the
    environment variable ASYNCRL_TEACHER_API_KEY; `model` is then only read for its tokenizer and context length."""
    request_timeout: Positive = 120.0
    """Timeout of one request in seconds; then another engine is tried."""
    retry_timeout: Positive = 600.0
    """Seconds for which an episode is resent while no engine answers; then its group is dropped, with the reason
    `teacher`. Must be longer than an engine takes to restart."""

    @property
    def started(self) -> int:
        """Return the number of engines that the launcher starts."""
        return 0 if self.urls else super().started

    @property
    def elsewhere(self) -> list[str]:
        """Return the URLs of engines that others started."""
        return self.urls


def teacher_of(config: Config) -> TeacherConfig:
    """Return the section of the teacher."""
    section = config.frozen["teacher"]
    assert isinstance(section, TeacherConfig)
    return section


class DistillHooks(extension.LaunchHooks):
    """The checks of the policy's model and of the teacher's."""

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Refuse a teacher of a model that sees, under whose distribution there are image tokens."""
        from asyncrl.models.families import family_of

        teacher = teacher_of(config)
        if teacher.model and family_of(model).tower:
            remedy = "Teachers score text only: unset it, or choose a text model."
            yield ConfigError("teacher.model", teacher.model, remedy)

    def refuse(self, prepared: Preparation) -> None:
        """Refuse a teacher that cannot score the policy."""
        from asyncrl.extensions.distill.tokens import check

        check(prepared)


class Distill(extension.Extension):
    """Distillation, and a teacher as the reference of the KL."""

    Settings = DistillSettings
    models = {"teacher": TeacherConfig}  # noqa: RUF012
    references = ("teacher",)
    metrics = {  # noqa: RUF012
        "kl/teacher": "k3 estimate of KL(policy || teacher) over the trained tokens, at the start of the step; only if "
        "rollout.temperature is 1",
        "teacher/gap": "mean log-probability of the policy minus that of the teacher over the trained tokens (k1 "
        "estimate); if rollout.temperature is not 1, the gap at temperature 1 divided by rollout.temperature",
        "teacher/tokens": "number of tokens that were sent to the teacher's engines since the previous step",
        "teacher/cached": "fraction of these tokens that the engines found in their prefix cache",
        "teacher/retried": "number of requests to the teacher that were sent again since the previous step",
        "time/teacher": "mean time from the end of an episode until the teacher has scored it, since the previous step",
    }

    @property
    def signal(self) -> bool:
        """Return whether distillation is on."""
        settings: DistillSettings = self.settings
        return settings.coefficient > 0

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Check the section, and the settings of the teacher."""
        settings: DistillSettings = self.settings
        teacher = teacher_of(config)
        referred = "teacher" if config.algo.kl.reference == "teacher" else None
        needed: dict[str, Any] = {"distill.coefficient": settings.coefficient, "algo.kl.reference": referred}
        needed["teacher.urls"] = teacher.urls
        for field, value in needed.items():
            if value and teacher.model is None:
                yield ConfigError(field, value, "It needs a teacher: set teacher=sglang teacher.model=FOLDER.")
        if settings.discount and settings.place == "loss":
            remedy = "It applies to distill.place=advantage only: set 0."
            yield ConfigError("distill.discount", settings.discount, remedy)
        temperature = config.rollout.temperature
        if teacher.model and temperature != 1.0 and (settings.discount or referred):
            what = "distill.discount" if settings.discount else "algo.kl.reference=teacher"
            remedy = (
                "SGLang always computes the log-probabilities of given tokens at temperature 1, so at another one "
                f"{what} would be wrong (loss.py of the extension). Set 1.0, or disable it."
            )
            yield ConfigError("rollout.temperature", temperature, remedy)
        for url in teacher.urls:
            if not url.startswith(("http://", "https://")):
                yield ConfigError("teacher.urls", url, "Must be the address of an engine, as http://HOST:PORT.")

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return DistillHooks()

    def player(self, config: Config, addresses: Any) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        if not addresses.frozen.get("teacher"):
            return extension.PlayerHooks()
        from asyncrl.extensions.distill.scorer import scorer

        return scorer(config, addresses)

    def trainer(self, policy: Any) -> extension.TrainerHooks:
        """Return the hooks on a trainer rank."""
        from asyncrl.extensions.distill.loss import Distillation

        return Distillation(self.settings, policy)


Own = Distill
