"""What this folder adds: mode=sft and the task `chat`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Rule, Section, value_of

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.trainer.policy import Policy

MODE, KIND = "sft", "chat"


class SftSettings(Section):
    """Supervised training (mode=sft) on the conversations of task=chat, rollout.batch_groups of them in a step."""

    epochs: Count | None = None
    """Number of times that every row is trained; unset: until run.max_steps, which ends the run in any case."""


class Sft(extension.Extension):
    """Supervised training."""

    Settings = SftSettings
    modes = {MODE: extension.OfferedMode(trains=True)}  # noqa: RUF012
    metrics = {  # noqa: RUF012
        "sft/epoch": "number of times that every row has been trained",
        "sft/held_out": "mean loss of the tokens of the rows that are held out",
        "sft/held_out/before": "the same before the first step, in the record of that step",
    }
    tasks = {KIND: "asyncrl.extensions.sft.rows:ChatRows"}  # noqa: RUF012

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Check the settings that mean something else, or nothing, to supervised training."""
        algo, epochs = config.algo, self.settings.epochs
        if config.mode != MODE and epochs is not None:
            yield ConfigError("sft.epochs", epochs, "It applies to mode=sft only: remove it.")
        if config.mode != MODE:
            return
        kinds = [task.kind for task in config.mixture.values()]
        sets, roles = sorted(config.eval.sets), sorted(config.agents.roles)
        no_part = "It is no part of the loss: set 0."
        of_model = "The loss is that of the model's own distribution: set 1.0."
        no_engine = "No engine runs: hold out rows with task.eval_file, and ask questions with mode=evaluate."
        rules: list[Rule] = [
            ("task.kind", kinds, kinds != [KIND], "Supervised training needs conversations: set task=chat."),
            ("algo.advantage", algo.has_critic, "There are no rewards: leave it unset."),
            ("rollout.temperature", config.rollout.temperature != 1.0, of_model),
            ("algo.epochs × algo.mini_batches", algo.steps, algo.steps != 1, "One step is taken on a batch: set 1."),
            ("algo.kl.coefficient", algo.kl.coefficient != 0, no_part),
            ("algo.entropy_bonus", algo.entropy_bonus != 0, no_part),
            ("algo.aggregation", algo.aggregation == "constant", "Set token or sequence."),
            ("eval.sets", sets, bool(sets), no_engine),
            ("agents.roles", roles, bool(roles), "Rows have no roles: remove them."),
        ]
        for field, *shown, broken, remedy in rules:
            if broken:
                yield ConfigError(field, shown[0] if shown else value_of(config, field), remedy)

    def trainer(self, policy: Policy) -> extension.TrainerHooks:
        """Return the hooks on a trainer rank."""
        if policy.config.mode != MODE:
            return extension.TrainerHooks()
        from asyncrl.extensions.sft import training

        return training.Supervised(self.settings, policy)


Own = Sft
