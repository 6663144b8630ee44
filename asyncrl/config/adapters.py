"""Settings of engines that serve LoRA adapters (weights.lora=versions)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.lora import LoraConfig
from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a dense model, by their names in HF, in PEFT and in SGLang."""
NEEDS = (("q_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj", "q_proj"), ("up_proj", "gate_proj"))
"""Projections, each with another one without which SGLang (0.5.21, lora/lora.py) refuses or ignores it."""
MOST_RESIDENT = 32
"""Maximum number of resident adapters: an engine holds memory for the largest of them that many times."""
VERSIONS = "weights.lora=versions"


def adapter_targets(lora: LoraConfig) -> list[str]:
    """Return the projections that have an adapter."""
    return list(LINEARS) if lora.targets == "all" else list(lora.targets)


def resident_adapters(config: Config) -> int:
    """Return the maximum number of adapters in an engine.

    Running groups were admitted at most max_staleness versions ago (rollout/buffer.py), so they use max_staleness + 1
    versions; the next one is loaded beside them, and an evaluation keeps the one that it began with. Past versions that
    play roles are as many as these groups can have drawn beside the versions above.
    """
    evaluated = bool(config.eval_sets)
    past = sum(past.keep + evaluated for past in config.agents.past.values())
    return (config.rollout.max_staleness + 2 + evaluated) * len(config.adapters) + past


def engine_slots(config: Config) -> int:
    """Return the number of adapters that an engine has memory for. The base counts as one."""
    return resident_adapters(config) + 1


def check_adapters(config: Config) -> None:
    """Refuse settings that do not fit adapters in the engines. Raises ConfigError."""
    if not (config.serves_adapters or (config.agents.need_versions and config.mode == "train")):
        return
    require(config, _rules(config))


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the remedy."""
    targets, resident = set(adapter_targets(config.trainer.lora)), resident_adapters(config)
    otherwise = "remove agents.roles" if config.agents.need_versions else "set weights.lora=merged"
    return [
        (
            "weights.transport",
            config.weights.transport not in ("auto", "tensor", "disk"),
            f"With {VERSIONS} adapters travel through shared memory or as files: set auto, tensor or disk.",
        ),
        (
            "cluster.placement",
            config.cluster.takes_turns,
            f"An engine that releases its memory loses its adapters ({VERSIONS}): {otherwise}.",
        ),
        (
            "trainer.lora.targets",
            not targets <= set(LINEARS),
            f"With {VERSIONS} engines serve adapters of {', '.join(LINEARS)}: choose among them, or {otherwise}.",
        ),
        (
            "trainer.lora.targets",
            not all({needed} <= targets for present, needed in NEEDS if present in targets),
            f"SGLang fuses projections and takes no k_proj without q_proj, no q_proj without v_proj, and no up_proj "
            f"without gate_proj ({VERSIONS}): add them, or {otherwise}.",
        ),
        (
            "rollout.max_staleness",
            resident > MOST_RESIDENT,
            f"Engines would hold {resident} adapters, more than {MOST_RESIDENT} ({VERSIONS}): lower it, or "
            f"{otherwise}.",
        ),
    ]
