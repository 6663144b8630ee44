"""Old names of settings and of what they name. They are accepted for one release: in overrides, in YAML files, and in
old runs' config.json.

Hydra refuses unknown names before any model sees them, so the overrides of the command line are rewritten first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

RENAMED = {
    "algo.discount": "algo.advantage.discount",
    "algo.gae_lambda": "algo.advantage.gae_lambda",
    "algo.pass_k": "algo.advantage.k",
    "algo.correct_above": "algo.advantage.correct_above",
    "algo.step_weight": "algo.advantage.step_weight",
    "algo.critic_path": "algo.critic.path",
    "algo.critic_lr": "algo.critic.lr",
    "algo.critic_warmup": "algo.critic.warmup",
    "algo.value_clip": "algo.critic.value_clip",
    "algo.overlong_buffer": "algo.shaping.overlong_buffer",
    "algo.overlong_penalty": "algo.shaping.overlong_penalty",
    "algo.length_penalty": "algo.shaping.length_penalty",
    "algo.reward_clip": "algo.shaping.clip",
    "algo.normalize_rewards": "algo.shaping.normalize",
    "algo.mask_truncated": "algo.shaping.mask_truncated",
    "algo.clip_low": "algo.loss.clip_low",
    "algo.clip_high": "algo.loss.clip_high",
    "algo.dual_clip": "algo.loss.dual_clip",
    "algo.dppo_trust": "algo.loss.trust",
    "algo.sapo_up": "algo.loss.up",
    "algo.sapo_down": "algo.loss.down",
    "algo.m2_threshold": "algo.loss.threshold",
    "algo.correction_cap": "algo.correction.cap",
    "algo.correction_floor": "algo.correction.floor",
    "algo.mask_sequence": "algo.mask.sequence",
    "algo.mask_geometric": "algo.mask.geometric",
    "algo.mask_opsm": "algo.mask.opsm",
    "algo.mask_lag": "algo.mask.lag",
    "algo.kl_coefficient": "algo.kl.coefficient",
    "algo.kl_estimator": "algo.kl.estimator",
    "algo.kl_place": "algo.kl.place",
    "algo.kl_meter_every": "algo.kl.measure_every",
    "algo.reference": "algo.kl.reference",
    "algo.reference_path": "algo.kl.reference_path",
    "algo.reference_offload": "algo.kl.reference_offload",
    "algo.distill_coefficient": "algo.distillation.coefficient",
    "algo.distill_place": "algo.distillation.place",
    "algo.distill_discount": "algo.distillation.discount",
    "metrics.tensorboard": "metrics.sinks",
}
"""Every old name of a setting, and its new one."""
MOVED = {
    "asyncrl.agents.forking:": "asyncrl_recipes.forking.agent:",
    "asyncrl.agents.guided:": "asyncrl_recipes.guided.agent:",
    "asyncrl.agents.memory:": "asyncrl_recipes.memory.agent:",
    "asyncrl.agents.openai_example:": "asyncrl_recipes.openai_agent.agent:",
    "asyncrl.agents.opponents:": "asyncrl_recipes.self_play.opponents:",
    "asyncrl.agents.self_play:": "asyncrl_recipes.self_play.agent:",
    "asyncrl.envs.toys:Nim": "asyncrl_recipes.self_play.nim:Nim",
    "asyncrl.envs.toys:nim_expert": "asyncrl_recipes.self_play.nim:nim_expert",
    "asyncrl.envs.sandbox.": "asyncrl.sandbox.",
}
"""Beginnings of old import paths, which are values of settings, and the new ones."""
RECIPES = {name: f"asyncrl_recipes.gigpo.advantage:{name}" for name in ("gigpo", "dr_gigpo")}
"""Old values of algo.advantage that are recipes now."""
RECIPE_SETTINGS = ("discount", "step_weight")
"""Settings of these recipes."""
CHOICES = ("algo.advantage", "algo.loss", "algo.correction")
"""Fields that name an algorithm and hold its settings (settings.Choice)."""
_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w.@]+)(?:=(.*))?", re.DOTALL)


def warning(old: str) -> str:
    """Return the message about an old name."""
    new = {**RENAMED, **MOVED, **RECIPES}[old]
    return f"WARNING: {old} is called {new} now; the old name will be refused in the next release."


def overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line with new names, and the old names that it had.

    The settings of an algorithm stand in no YAML file (their defaults are those of its function), so Hydra would refuse
    them without `++`; and one algorithm replaces the other with all of its settings.
    """
    found, old = list[str](), list[str]()
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if not match or match[3] is None:
            found.append(word)
            continue
        prefix, name, value = match.groups()
        if name in RENAMED:
            old.append(name)
            name = RENAMED[name]
        old += [path for path in MOVED if path in value]
        for path, new in MOVED.items():
            value = value.replace(path, new)
        if name == "algo.advantage" and value in RECIPES:
            old.append(value)
            value = RECIPES[value]
        if name in CHOICES and not prefix and value != "null":
            found += [f"~{name}", f"+{name}={value}" if value.startswith("{") else f"++{name}.name={value}"]
        elif name.rpartition(".")[0] in CHOICES:
            found.append(f"++{name}={value}")
        else:
            found.append(f"{prefix}{name}={value}")
    return found, old


def values(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return settings with new names, and the old names that they had. Where a setting belongs to an algorithm that is
    not chosen, it had no effect and is dropped."""
    moved: dict[str, None] = {}
    changed: Any = _copied(given, moved)
    _follow_recipes(changed.get("algo"), moved)
    old = [name for name in RENAMED if _is_set(changed, name)]
    for name in old:
        *path, last = name.split(".")
        value = _section(changed, path).pop(last)
        place, _, setting = RENAMED[name].rpartition(".")
        *path, last = place.split(".")
        section = _section(changed, path)
        if place in CHOICES:
            if (chosen := section.get(last)) is None:
                continue
            section[last] = {"name": chosen} if isinstance(chosen, str) else chosen
            if not _has_setting(place, str(section[last].get("name")), setting):
                continue
        section.setdefault(last, {}).setdefault(setting, value)
    return changed, [*old, *moved]


def _follow_recipes(algo: Any, moved: dict[str, None]) -> None:
    """Replace the name of an advantage estimator that became a recipe, and note it in `moved`."""
    chosen = algo.get("advantage") if isinstance(algo, dict) else None
    choice = {"name": chosen} if isinstance(chosen, str) else chosen
    if isinstance(choice, dict) and choice.get("name") in RECIPES:
        moved[choice["name"]] = None
        algo["advantage"] = {**choice, "name": RECIPES[choice["name"]]}


def _has_setting(place: str, name: str, setting: str) -> bool:
    if name in RECIPES.values():
        return setting in RECIPE_SETTINGS
    from asyncrl import algo  # imports pydantic, which a command line without old names does without

    registries: Any = (algo.advantage.ADVANTAGES, algo.loss.LOSSES, algo.correction.CORRECTIONS)
    return ":" in name or setting in dict(zip(CHOICES, registries, strict=True))[place].settings_of(name)


def _is_set(values: Any, name: str) -> bool:
    *path, last = name.split(".")
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return isinstance(values, dict) and last in values


def _section(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for part in path:
        values = values[part]
    return values


def _copied(value: Any, moved: dict[str, None]) -> Any:
    """Copy mappings, and texts with new import paths. Note the old paths in `moved`. Other values may refer to secrets,
    and stay as they are."""
    if isinstance(value, dict):
        return {name: _copied(item, moved) for name, item in value.items()}
    if type(value) is str:
        for path, new in MOVED.items():
            if value.startswith(path):
                moved[path] = None
                return new + value.removeprefix(path)
    return value
