"""Rules of adapters: which settings they exclude, and what engines that serve them need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.config import Config
from asyncrl.config.lora import LoraConfig
from asyncrl.extensions.lora.bases import bases
from asyncrl.extensions.lora.roles import needed
from asyncrl.models.families import family_of, known_families
from asyncrl.schema import POLICY
from asyncrl.settings import Rule

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a dense model, by their names in HF, in PEFT and in SGLang."""
NEEDS = (("q_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj", "q_proj"), ("up_proj", "gate_proj"))
"""Projections, each with another one without which SGLang (0.5.21, lora/lora.py) refuses or ignores it."""
MOST_RESIDENT = 32
"""Maximum number of resident adapters: an engine holds memory for the largest of them that many times."""
VERSIONS = "weights.lora=versions"


def roles(config: Config) -> Iterator[Rule]:
    """Yield the rules of roles whose adapters must be trained and served."""
    roles = config.agents.roles
    for name, role in roles.items():
        if role.past is None:
            continue
        field, shown = f"agents.roles.{name}.past", role.past.model_dump()
        others = [one for one in roles.values() if one.adapter == role.adapter]
        why = f"No role trains the adapter {role.adapter}: name one, or set another agents.roles.{name}.adapter."
        yield field, shown, role.adapter != POLICY and all(one.past for one in others), why
        why = f"Other roles play past versions of {role.adapter} with other settings: make them equal."
        yield field, shown, any(one.past not in (None, role.past) for one in others), why
    if not config.trains or not config.agents.need_versions:
        return
    why = "Roles have LoRA adapters (agents.roles): set a rank."
    yield "trainer.lora.rank", config.trainer.lora.rank is None, why
    why = (
        "Engines hold one set of merged weights, but roles have several adapters or past versions (agents.roles): "
        "set weights.lora=versions."
    )
    yield "weights.lora", config.weights.lora == "merged", why
    overlaps = config.trainer.overlap_grad_reduce and len(config.agents.adapters) > 1
    why = "The gradients of several adapters (agents.roles) are reduced after the passes of the last: set false."
    yield "trainer.overlap_grad_reduce", overlaps, why


def served(config: Config) -> Iterator[Rule]:
    """Yield the rules of engines that serve adapters."""
    if not (needs_versions(config)):
        return
    targets, resident = set(adapter_targets(config.trainer.lora)), resident_adapters(config)
    otherwise = "remove agents.roles" if config.agents.need_versions else "set weights.lora=merged"
    why = f"With {VERSIONS} adapters travel through shared memory or as files: set auto, tensor or disk."
    yield "weights.transport", config.weights.transport not in ("auto", "tensor", "disk"), why
    why = f"With {VERSIONS} engines serve adapters of {', '.join(LINEARS)}: choose among them, or {otherwise}."
    yield "trainer.lora.targets", not targets <= set(LINEARS), why
    why = (
        "SGLang fuses projections and takes no k_proj without q_proj, no q_proj without v_proj, and no up_proj without "
        f"gate_proj ({VERSIONS}): add them, or {otherwise}."
    )
    lacks = any(other not in targets for present, other in NEEDS if present in targets)
    yield "trainer.lora.targets", lacks, why
    why = f"Engines would hold {resident} adapters, more than {MOST_RESIDENT} ({VERSIONS}): lower it, or {otherwise}."
    yield "rollout.max_staleness", resident > MOST_RESIDENT, why


def serves(config: Config) -> bool:
    """Return whether every version is an adapter of its own in the engines. Requires a resolved weights.lora."""
    return config.trainer.lora.rank is not None and config.weights.lora == "versions" and config.mode == "train"


def needs_versions(config: Config) -> bool:
    """Return whether it is, or will be, because roles need it."""
    return serves(config) or (config.agents.need_versions and config.mode == "train")


def others(config: Config) -> Iterator[Rule]:
    """Yield the rules of settings of the core that do not fit adapters."""
    adapters = list(config.agents.adapters)
    why = "Every adapter has its own denominator. Change it, or set trainer.batch_parts=1."
    yield "agents.roles", adapters, len(adapters) > 1 and config.trainer.batch_parts > 1, why
    if config.weights.overlap:
        why = (
            "Adapters as versions of their own are published without a pause (weights.overlap): set merged, or set "
            "weights.overlap=false."
        )
        yield "weights.lora", needs_versions(config), why
    names = ["none", *bases()]
    why = f"Must be one of {', '.join(names)}: no extension that is installed has another."
    yield "trainer.lora.base", config.trainer.lora.base not in names, why
    why = "Megatron's own layers alone compute with a quantized base (trainer.lora.base): set local."
    fused = config.trainer.layers == "transformer_engine"
    yield "trainer.layers", fused and config.trainer.lora.base != "none", why


def of_model(config: Config, model: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of a model whose adapters are trained and served. `model` has the fields of its config.json."""
    family, trainer, adapts = family_of(model), config.trainer, config.trainer.lora.rank is not None
    why = f"Adapters of {family.architecture} are not supported, because its files hold fused layers: set null."
    yield "trainer.lora.rank", adapts and not family.adapters, why
    problem = not_served(model)
    needs = config.mode == "train" and config.agents.need_versions
    why = f"Roles have adapters of their own or past versions, but {problem}: remove them."
    yield "agents.roles", sorted(config.agents.roles), needs and bool(problem), why
    yield "weights.lora", serves(config) and bool(problem), f"{problem}: set merged."
    recomputes = trainer.recompute.granularity == "selective" and "moe_act" in trainer.recompute.modules
    why = "Only grouped experts have it: set trainer.layers=transformer_engine without trainer.lora, or use moe."
    yield "trainer.recompute.modules", "moe_act", adapts and recomputes, why


def not_served(model: dict[str, Any]) -> str:
    """Return why engines cannot serve adapters of this model; empty if they can."""
    architecture = model["architectures"][0]
    served = [name for name, family in known_families().items() if family.serving.adapters]
    return "" if architecture in served else f"engines serve adapters of {', '.join(served)}, not of {architecture}"


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
    return (config.rollout.max_staleness + 2 + evaluated) * len(config.agents.adapters) + past


def engine_slots(config: Config) -> int:
    """Return the number of adapters that an engine has memory for. The base counts as one."""
    return resident_adapters(config) + 1


def past_versions(config: Config, version: int) -> dict[str, list[int]]:
    """Return the past versions of each adapter that episodes may use while `version` is the newest."""
    bound = config.rollout.max_staleness
    return {adapter: needed(past, version, bound) for adapter, past in config.agents.past.items()}
