"""The choice of how new weights travel: the transport, and with LoRA whether versions are adapters of their own.
Imports no torch, because the launcher reports the choice before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config import Config, on_gpu
from asyncrl.config.rules import check_adapters
from asyncrl.errors import ConfigError
from asyncrl.lookup import active
from asyncrl.models.families import known_families

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def choose(setting: str, engines: Sequence[str], host: str, *, gpu: bool, shared: bool = False) -> tuple[str, str]:
    """Return the transport for the setting `weights.transport`, and the reason. `shared` says that trainers and
    engines share their GPUs. Raises ConfigError if it cannot reach the engines."""
    hosts = {str(urlsplit(url).hostname) for url in engines}
    here = hosts <= LOOPBACK | {host}
    if not here and (setting == "tensor" or (setting == "auto" and shared)):
        raise ConfigError(
            "weights.transport",
            setting,
            f"The engines are on the hosts {sorted(hosts)}, but shared memory works only within one host: set "
            + ("disk." if shared else "auto."),
        )
    if setting != "auto":
        return setting, "as configured"
    if shared:
        return "tensor", "engines and trainers share their devices: engines read the buckets where they are"
    if gpu:
        return "distributed", "trainers and engines have separate GPUs: NCCL uses the fastest path between them"
    if here:
        return "tensor", "all engines are on this host: buckets travel through shared memory"
    return "distributed", f"engines are on {sorted(hosts)}: buckets travel by broadcast"


def choose_lora(config: Config, hf: dict[str, Any], gpus: int) -> tuple[Config, str]:
    """Return the configuration with weights.lora resolved, and the reason; no reason without LoRA. `hf` is the model
    folder's config.json. Raises ConfigError if the engines cannot serve the adapters as configured."""
    setting = config.weights.lora
    if config.trainer.lora.rank is None or config.mode != "train":
        return config, ""
    if setting == "auto":
        way, why = _way(config, hf, gpus)
    else:
        way, why = setting, "as configured"
    if way == "versions" and (problem := not_served(hf)):
        raise ConfigError("weights.lora", "versions", f"{problem}: set merged.")
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
        check_adapters(versions)
        for one in active(versions).values():
            for wrong in one.check(versions):
                raise wrong
    except ConfigError as error:
        return "merged", f"{error.field}={error.value} does not fit versions"
    return "versions", "adapters load without a pause"


def not_served(hf: dict[str, Any]) -> str:
    """Return why engines cannot serve adapters of this model; empty if they can."""
    architecture = hf["architectures"][0]
    served = [name for name, family in known_families().items() if family.serving.adapters]
    return "" if architecture in served else f"engines serve adapters of {', '.join(served)}, not of {architecture}"


def _with(config: Config, way: str) -> Config:
    return config.model_copy(update={"weights": config.weights.model_copy(update={"lora": way})})
