"""Check of the settings that trainer.batch_parts requires, with which a batch is trained before it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algo.advantage import ADVANTAGES, AdvantageTraits
from asyncrl.algo.loss import LOSSES, LossTraits
from asyncrl.config.rules import Rule, require
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config

FIELD = "trainer.batch_parts"
REMEDY = f"Change it, or set {FIELD}=1."


def check_batch_parts(config: Config) -> None:
    """Refuse settings under which a batch cannot be trained in parts. Raises ConfigError."""
    parts, groups = config.trainer.batch_parts, config.rollout.batch_groups
    if parts == 1:
        return
    if parts > groups:
        raise ConfigError(FIELD, parts, f"A batch has rollout.batch_groups={groups} groups: set at most {groups}.")
    require(config, _rules(config), f" {REMEDY}")
    check_traits(config, ADVANTAGES.traits(config.algo.advantage), LOSSES.traits(config.algo.loss))


def check_traits(config: Config, advantage: AdvantageTraits, loss: LossTraits) -> None:
    """Refuse an estimator or a loss that needs the whole batch, if it comes in parts. The traits of a user's own
    function are known to the trainer only. Raises ConfigError."""
    if config.trainer.batch_parts == 1:
        return
    if advantage.whole_batch or advantage.critic:
        raise ConfigError("algo.advantage", config.algo.advantage.name, f"It needs the whole batch. {REMEDY}")
    if loss.selection:
        problem = "Its choice of tokens needs the whole batch."
        raise ConfigError("algo.loss", config.algo.loss.name, f"{problem} {REMEDY}")


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the reason."""
    algo, trains = config.algo, config.mode == "train"
    return [
        ("algo.mini_batches", algo.mini_batches > 1, "Parts are accumulated into a single step."),
        ("algo.epochs", algo.epochs > 1, "Parts are accumulated into a single step."),
        ("algo.shaping.normalize", algo.shaping.normalize, "It needs the whole batch."),
        ("agents.roles", list(config.adapters), len(config.adapters) > 1, "Every adapter has its own denominator."),
        ("rollout.over_age", config.rollout.over_age == "drop", "What is dropped is decided when a batch is complete."),
        (
            "cluster.placement",
            config.cluster.takes_turns,
            "Engines stand still while trainers work, so that no group would become ready.",
        ),
        ("deterministic", config.deterministic and trains, "Timing decides which groups a part consists of."),
    ]
