"""The choice of how versions reach the engines: as adapters of their own, or merged into the weights. Imports no torch,
because the launcher makes it."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.rules import not_served
from asyncrl.lookup import active


def choose_lora(config: Config, hf: dict[str, Any], gpus: int) -> tuple[Config, str]:
    """Return the configuration with weights.lora resolved, and the reason; no reason without LoRA. `hf` is the model
    folder's config.json."""
    setting = config.weights.lora
    if config.trainer.lora.rank is None or config.mode != "train":
        return config, ""
    if setting == "auto":
        way, why = _way(config, hf, gpus)
    else:
        way, why = setting, "as configured"
    return _with(config, way), f"{way} ({why})"


def _way(config: Config, hf: dict[str, Any], gpus: int) -> tuple[str, str]:
    if config.agents.need_versions:
        return "versions", "roles have adapters of their own or past versions"
    if config.weights.overlap:
        return "merged", "weights.overlap publishes full weights"
    if not on_gpu(config.engine, gpus):
        return "merged", "on CPUs SGLang computes adapters slowly"
    if problem := not_served(hf):
        return "merged", problem
    if config.engine.urls:
        return "merged", "engine.urls names engines, which may have been started without adapters"
    versions = _with(config, "versions")
    try:
        for one in active(versions).values():
            for wrong in one.check(versions):
                raise wrong
    except ConfigError as error:
        return "merged", f"{error.field}={error.value} does not fit versions"
    return "versions", "adapters load without a pause"


def _with(config: Config, way: str) -> Config:
    return config.model_copy(update={"weights": config.weights.model_copy(update={"lora": way})})
