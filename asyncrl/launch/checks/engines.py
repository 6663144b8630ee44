"""Checks of engines: those that run already (engine.urls), fields of requests, kinds of GPUs, and the transport of new
weights to them."""

from __future__ import annotations

import ast
import difflib
import os
import secrets
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from asyncrl.config import Config, on_gpu
from asyncrl.config.lora import resident_adapters
from asyncrl.engine.server import adapter_args
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.findings import Finding, error, ok
from asyncrl.launch.checks.model_files import BYTES, Weight
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Node, Placement, Seat
from asyncrl.lookup import active
from asyncrl.weights.choice import choose

KEY = "ASYNCRL_API_KEY"
FIELD = "engine.urls"
ANSWER_SECONDS = 30.0


def run_key(config: Config) -> str:
    """Return the API key of a run: a new one, or with engine.urls the one in the environment, if set."""
    return (os.environ.get(KEY) if config.engine.urls else None) or secrets.token_hex(24)


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
        **_adapters_of(config),
        **({"enable_return_routed_experts": True} if config.algo.routing_replay == "R3" else {}),
        **({"enable_deterministic_inference": True} if config.deterministic else {}),
    }


def _adapters_of(config: Config) -> dict[str, Any]:
    fields = ("enable_lora", "max_lora_rank", "max_loras_per_batch", "lora_strict_loading")
    return {name: value for name, value in adapter_args(config, gpu=True).items() if name in fields}


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


def check_request_fields(config: Config) -> None:
    """Refuse fields of requests that SGLang does not know, and would ignore. They are read from its source, since its
    import takes seconds."""
    spec = find_spec("sglang") if config.engine.request_fields else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        tree = ast.parse(Path(folder, "srt/managers/io_struct.py").read_text())
        (known,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "GenerateReqInput")
        names = [ast.unparse(one.target) for one in known.body if isinstance(one, ast.AnnAssign)]
        for name, value in config.engine.request_fields.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                remedy = "Requests to SGLang's /generate have no such field" + (
                    f": did you mean {near[0]}?" if near else "."
                )
                raise ConfigError(f"engine.request_fields.{name}", value, remedy)


def check_gpu_kinds(
    config: Config, seats: Iterable[Seat], nodes: Sequence[Node], machines: Sequence[MachineFacts]
) -> None:
    """Refuse settings with which an engine dies at its start, or at its second version, on the GPUs of its seats.
    `machines` has what is known of `nodes`, in their order. Raises ConfigError."""
    known = {node.name: machine for node, machine in zip(nodes, machines, strict=False)}
    placed = [(known[seat.node.name], seat.visible.split(",")) for seat in seats if seat.node.name in known]
    for gpu in sorted({one.name for machine, visible in placed for one in machine.visible(visible)}):
        for extension in active(config).values():
            for problem in extension.launch().check_gpu(config, gpu):
                raise problem


def check_sync(config: Config, placement: Placement, weights: Sequence[Weight], gpus: int) -> list[Finding]:
    """Report the transport, the reason for it, and the size of a publish. `gpus` is per machine, as in
    addresses.json."""
    if config.mode != "train" or not placement.trainers:
        return []
    engines, gpu = (*placement.urls()["engines"], *config.engine.urls), on_gpu(config.trainer, gpus)
    hosts = {seat.node.address for seat in placement.trainers}
    try:
        host = hosts.pop() if len(hosts) == 1 else ""  # as weights/publish.py receives it
        shared, gpu = config.cluster.shares_gpus, gpu and not config.serves_adapters
        chosen, why = choose(config.weights.transport, engines, host, gpu=gpu, shared=shared)
    except ConfigError as problem:
        return [error(problem.field, str(problem.value), problem.remedy)]
    if config.serves_adapters:
        carried = "adapters in shared memory" if chosen == "tensor" else "adapters as PEFT folders"
        text = f"{carried}: {why}; at most {resident_adapters(config)} in each engine"
        return [ok("weights.transport", text)]
    item = BYTES[config.trainer.dtype]
    sizes = [one.elements * item for one in weights]
    count = len(packed(sizes, config.weights.bucket_mb << 20))
    text = f"{chosen}: {why}; {sum(sizes) / 1e9:.3g} GB per publish, in about {count} bucket(s)"
    return [ok("weights.transport", text)]


def packed(sizes: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of tensors of each bucket, in order, as weights/bucket.py plans them. A larger
    tensor gets a bucket of its own."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        filled, count = found[-1] if found else (limit, 0)
        if not found or filled + size > limit:
            found.append((size, 1))
        else:
            found[-1] = (filled + size, count + 1)
    return found
