"""Check of the settings that engines and trainers on the same GPUs require: side by side (cluster.placement=shared), or
in turns (colocated)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require
from asyncrl.config.running import USABLE

if TYPE_CHECKING:
    from asyncrl.config import Config

TURNS = "cluster.placement=colocated"
SERVER_ARGS = ("disaggregation_mode", "weight_cache_mode", "enable_memory_saver", "speculative_algorithm")
"""SGLang settings with which an engine cannot release its memory and take it back, or that the run itself sets."""


def check_colocated(config: Config) -> None:
    """Refuse settings that do not fit engines and trainers on the same GPUs. Raises ConfigError."""
    if config.cluster.shares_gpus:
        require(config, _rules(config))
    if config.cluster.takes_turns:
        require(config, _rules_of_turns(config))


def _rules(config: Config) -> list[Rule]:
    """Return each rule of both placements as field, whether its value breaks it, and the remedy."""
    placed = f"cluster.placement={config.cluster.placement}"
    room = config.trainer_fraction
    return [
        ("cluster.placement", config.mode != "train", f"mode={config.mode} has no GPUs to share: set separate."),
        (
            "weights.transport",
            config.weights.transport == "distributed",
            f"NCCL refuses two ranks on one GPU ({placed}): set auto, tensor or disk.",
        ),
        (
            "engine.urls",
            bool(config.engine.urls),
            f"With {placed} engines share the GPUs of this run's trainers, so that it must start them: remove them.",
        ),
        (
            "engine.device",
            config.engine.device != config.trainer.device,
            f"With {placed} engines and trainers share their devices: set it to trainer.device "
            f"({config.trainer.device}).",
        ),
        (
            "engine.memory_fraction",
            room is not None and room <= 0,
            f"With {placed} the trainers get what is left of {USABLE}: set less.",
        ),
    ]


def _rules_of_turns(config: Config) -> list[Rule]:
    """Return each rule of turns as field, whether its value breaks it, and the remedy."""
    weights = config.weights
    rules: list[Rule] = [
        (
            "weights.pause_mode",
            weights.pause_mode == "in_place",
            f"With {TURNS} an engine gives up its KV cache, and SGLang releases memory only while no request runs: set "
            "retract (requests are prefilled again), abort or drain.",
        ),
        (
            "weights.verify",
            not weights.verify,
            f"With {TURNS} only the checksums show that every released tensor was sent again: set true.",
        ),
        (
            "rollout.max_staleness",
            config.rollout.max_staleness > 1,
            f"With {TURNS} engines stand still while trainers work, so that more would only age the samples: set 0 "
            "(synchronous) or 1 (one step off).",
        ),
    ]
    offload = config.trainer.optimizer.offload
    remedy = f"{TURNS} moves the optimizer's states away by itself, with everything else: set false."
    rules.append(("trainer.optimizer.offload", offload, remedy))
    for name in SERVER_ARGS:
        remedy = f"SGLang cannot take turns ({TURNS}) with it: remove it."
        rules.append((f"engine.server_args.{name}", config.engine.server_args.get(name) is not None, remedy))
    return rules
