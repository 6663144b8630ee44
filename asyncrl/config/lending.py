"""Check of the settings that cluster.lend requires: the trainers lend their GPUs to engines while they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.colocated import SERVER_ARGS
from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config

FIELD = "cluster.lend"


def check_lending(config: Config) -> None:
    """Refuse settings under which the trainers cannot lend their GPUs. Raises ConfigError."""
    if not config.cluster.lend:
        return
    require(config, _rules(config), f", or set {FIELD}=false.")


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the remedy."""
    weights, engine, trainer = config.weights, config.engine, config.trainer
    rules: list[Rule] = [
        (
            "cluster.elastic",
            config.cluster.elastic != "act",
            f"{FIELD} lends GPUs when the controller has decided it: set act",
        ),
        (
            "weights.pause_mode",
            weights.pause_mode == "drain",
            "When a batch is complete, the requests of lent engines continue elsewhere at once: set in_place, retract "
            "or abort",
        ),
        (
            "weights.verify",
            not weights.verify,
            "Only the checksums show that a lent engine got every tensor again: set true",
        ),
        (
            "weights.overlap",
            weights.overlap,
            "The version of a loan must be the one that all engines serve already: set false",
        ),
        (
            "engine.device",
            engine.device != trainer.device,
            f"Lent engines use the trainers' devices: set it to trainer.device ({trainer.device})",
        ),
        (
            "rollout.max_running_groups",
            config.rollout.max_running_groups is None,
            "Without a limit, requests wait in the queues of the engines that always serve, and none is left for lent "
            "ones: set auto, or a number",
        ),
        (
            "trainer.batch_parts",
            trainer.batch_parts > 1,
            "Between two parts the GPUs hold gradients, and cannot be lent: set 1",
        ),
        (
            "trainer.optimizer.offload",
            trainer.optimizer.offload,
            "A loan moves the optimizer's states away by itself: set false",
        ),
    ]
    for name in SERVER_ARGS:
        remedy = "An engine cannot release its memory with it: remove it"
        rules.append((f"engine.server_args.{name}", engine.server_args.get(name) is not None, remedy))
    return rules
