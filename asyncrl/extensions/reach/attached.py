"""Checks of engines that run already (engine.urls): whether they answer, and were started as the run needs them."""

from __future__ import annotations

from typing import Any

import httpx

from asyncrl import lookup
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.prepare import KEY

FIELD = "engine.urls"
ANSWER_SECONDS = 30.0


def check_attached(config: Config, key: str) -> None:
    """Query each attached engine, unless the run is a replay. Raises ConfigError if one does not answer, rejects the
    API key, or was started with other arguments."""
    for url in config.engine.urls if config.generates else ():
        info = _ask(url, "/server_info", key)
        for name, wanted in wanted_of(config).items():
            if info.get(name) != wanted:
                values = [] if wanted is True or wanted is None else wanted if isinstance(wanted, list) else [wanted]
                flag = " ".join([f"--{name.replace('_', '-')}", *map(str, values)])
                how = "without" if wanted is None else "with"
                raise ConfigError(FIELD, url, f"Its {name} is {info.get(name)!r}: start it {how} {flag}.")
        version = str(_ask(url, "/model_info", key).get("weight_version"))
        if not config.trains and not version.isdigit():  # nobody will assign another version
            remedy = f"Its weight_version is {version!r}, which is not a number: start it with --weight-version 0."
            raise ConfigError(FIELD, url, remedy)


def attached_dtype(config: Config, key: str) -> str | None:
    """Return the precision that the engines of engine.urls were started with; None if there are none, or they do not
    report it. Raises ConfigError if they differ from each other or from an explicit engine.dtype."""
    found: str | None = None if config.engine.dtype == "auto" else config.engine.dtype
    for url in config.engine.urls if config.generates else ():
        dtype = _ask(url, "/server_info", key).get("dtype")
        if dtype in (None, "auto"):
            continue
        if found not in (None, dtype):
            remedy = f"Its dtype is {dtype}, but engine.dtype or another engine has {found}: start it with that dtype."
            raise ConfigError(FIELD, url, remedy)
        found = str(dtype)
    return found if config.engine.urls else None


def wanted_of(config: Config) -> dict[str, Any]:
    """Return the fields of /server_info that every attached engine must have."""
    engine, publishes = config.engine, config.mode == "train"
    # the stock server's pauses record wrong versions with overlap; our own server mends it (engine/sglang_hooks.py)
    overlaps = publishes and config.weights.pause_mode == "in_place"
    shape = {"ep_size": engine.expert_parallel, "dp_size": engine.data_parallel, "pp_size": engine.pipeline_parallel}
    replicated = {"enable_dp_attention": True} if engine.data_parallel > 1 else {}
    return {
        "tp_size": engine.tensor_parallel,
        "incremental_streaming_output": True,
        **({"disable_overlap_schedule": True} if overlaps else {}),
        **({**shape, **replicated, "speculative_algorithm": None} if publishes else {}),  # as in checks/model.py
        **({"custom_weight_loader": [config.weight_loader]} if config.weight_loader else {}),
        **_added(config),
        **({"enable_deterministic_inference": True} if config.deterministic else {}),
    }


def _added(config: Config) -> dict[str, Any]:
    """Return the arguments of extensions that a server reports as they were given, among them those with which it
    reports what extensions ask for with each request."""
    fields = ("enable_lora", "max_lora_rank", "max_loras_per_batch", "lora_strict_loading")
    arguments = lookup.engine_arguments(config, gpu=True)
    return {name: value for name, value in arguments.items() if name in fields or name.startswith("enable_return_")}


def _ask(url: str, path: str, key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(url + path, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        remedy = f"It does not answer ({type(error).__name__} {error}): start it, or remove it."
        raise ConfigError(FIELD, url, remedy) from None
    if response.status_code in (401, 403):
        remedy = f"It rejects the run's API key: put the key that it was started with into {KEY}."
        raise ConfigError(FIELD, url, remedy)
    if response.status_code != 200:
        raise ConfigError(FIELD, url, f"It answers {response.status_code} to {path}: is it SGLang?")
    answer: dict[str, Any] = response.json()
    return answer
