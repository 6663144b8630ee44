"""Check of the settings that cluster.placement=colocated requires, where engines and trainers use the same GPUs in
turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config

TURNS = "cluster.placement=colocated"
SERVER_ARGS = ("disaggregation_mode", "weight_cache_mode", "enable_memory_saver", "speculative_algorithm")
"""SGLang settings with which an engine cannot release its memory and take it back, or that the run itself sets."""


def check_colocated(config: Config) -> None:
    """Refuse settings that do not fit engines and trainers that take turns. Raises ConfigError."""
    if config.cluster.placement != "colocated":
        return
    require(config, _rules(config))


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the remedy."""
    weights, rollout, engine = config.weights, config.rollout, config.engine
    rules: list[Rule] = [
        ("cluster.placement", config.mode != "train", f"mode={config.mode} has no turns to take: set separate."),
        (
            "weights.pause_mode",
            weights.pause_mode == "in_place",
            f"With {TURNS} an engine gives up its KV cache, and SGLang releases memory only while no request runs: set "
            "retract (requests are prefilled again), abort or drain.",
        ),
        (
            "weights.transport",
            weights.transport in ("delta", "distributed"),
            f"With {TURNS} an engine's weights are undefined after a release, so that no delta applies to them, and "
            "NCCL refuses two ranks on one GPU: set auto, tensor or disk.",
        ),
        (
            "weights.verify",
            not weights.verify,
            f"With {TURNS} only the checksums show that every released tensor was sent again: set true.",
        ),
        (
            "rollout.max_staleness",
            rollout.max_staleness > 1,
            f"With {TURNS} engines stand still while trainers work, so that more would only age the samples: set 0 "
            "(synchronous) or 1 (one step off).",
        ),
        (
            "engine.urls",
            bool(engine.urls),
            f"With {TURNS} engines share the GPUs of this run's trainers, so that it must start them: remove them.",
        ),
        (
            "engine.device",
            engine.device != config.trainer.device,
            f"With {TURNS} engines and trainers share their devices: set it to trainer.device "
            f"({config.trainer.device}).",
        ),
    ]
    offload = config.trainer.optimizer.offload
    remedy = f"{TURNS} moves the optimizer's states away by itself, with everything else: set false."
    rules.append(("trainer.optimizer.offload", offload, remedy))
    for name in SERVER_ARGS:
        remedy = f"SGLang cannot take turns ({TURNS}) with it: remove it."
        rules.append((f"engine.server_args.{name}", engine.server_args.get(name) is not None, remedy))
    return rules
