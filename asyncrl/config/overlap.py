"""Check of the settings that weights.overlap requires, with which a version is published while the next batch is
trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config


def check_overlap(config: Config) -> None:
    """Refuse settings under which no batch can be trained during a publish. Raises ConfigError."""
    if not config.weights.overlap:
        return
    require(config, _rules(config), ", or set weights.overlap=false.")


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the problem with another remedy."""
    weights, rollout = config.weights, config.rollout
    adapters = config.mode == "train" and (config.serves_adapters or config.agents.need_versions)
    lead = "rollout.lead" if rollout.max_staleness else "rollout.max_staleness"
    return [
        (
            "mode",
            not config.trains,
            "No weights are published without a trainer (weights.overlap): set mode=train",
        ),
        (
            "cluster.placement",
            config.cluster.takes_turns,
            "Trainers cannot use the GPUs while engines load (weights.overlap): set separate",
        ),
        (
            "weights.lora",
            adapters,
            "Adapters as versions of their own are published without a pause (weights.overlap): set merged",
        ),
        (
            "weights.staging",
            weights.staging == "stream",
            "The weights must be copied before the trainer changes them (weights.overlap): set full or auto",
        ),
        (
            lead,
            rollout.effective_lead,
            rollout.effective_lead < 1,
            "The next batch is admitted only after the publish (weights.overlap): set at least 1",
        ),
    ]
