"""Check of the settings that engine.prefill_count and engine.decode_count require, where some engines only prefill and
the others only decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config

APART = "engine.prefill_count and engine.decode_count"


def check_disaggregated(config: Config) -> None:
    """Refuse settings that do not fit engines that only prefill or only decode. Raises ConfigError."""
    if not config.engine.disaggregated:
        return
    require(config, _rules(config))


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the remedy."""
    engine, mode = config.engine, config.weights.pause_mode
    missing = "prefill_count" if not engine.prefill_count else "decode_count"
    return [
        (
            f"engine.{missing}",
            not (engine.prefill_count and engine.decode_count),
            "Engines that prefill need engines that decode, and the reverse: set both, or neither.",
        ),
        ("engine.count", engine.count > 0, f"{APART} start the engines: set 0."),
        ("engine.urls", bool(engine.urls), f"With {APART} the run starts its engines: remove them."),
        (
            "cluster.placement",
            config.cluster.placement == "colocated",
            f"SGLang releases no memory while KV caches are sent ({APART}): set separate.",
        ),
        (
            "weights.pause_mode",
            mode == "retract",
            "SGLang does not flush its caches while KV caches are sent, and sends none while it is paused: set "
            "in_place, abort or drain.",
        ),
        (
            "rollout.coalesce",
            config.rollout.coalesce,
            f"With {APART} every sample is a transfer of its own: set false.",
        ),
        (
            "algo.routing_replay",
            config.algo.routing_replay == "R3",
            "A decoding engine does not know the experts that the prefill chose: set none or R2.",
        ),
        ("weights.lora", config.serves_adapters, f"Adapters in engines were not tried with {APART}: set merged."),
    ]
