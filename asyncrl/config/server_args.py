"""SGLang's own arguments (engine.server_args): those that a run sets itself or cannot do with, and what those of
speculative decoding and of caches in host memory (engine.hicache) require."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from asyncrl.config.rules import Rule, require
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config, EngineConfig

INSTEAD = {
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "tensor_parallel"),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "ep"), "expert_parallel"),
    **dict.fromkeys(("dp_size", "data_parallel_size", "dp", "enable_dp_attention"), "data_parallel"),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pp"), "pipeline_parallel"),
    **dict.fromkeys(("enable_hierarchical_cache", "hicache_size"), "hicache"),
    "mem_fraction_static": "memory_fraction",
}
"""Settings in place of SGLang's arguments. Placement, publishes and the other checks follow from them."""
CANNOT_LOAD = {
    "quantization": "remove it.",
    "torchao_config": "remove it.",
    "moe_runner_backend": "remove it (the engines use triton's).",
}
"""Arguments with which SGLang 0.5.21 rewrites weights after it has loaded them, so that no version can follow. Experts
that run on FlashInfer's kernels, its default on Blackwell, are permuted in memory (layers/quantization/unquant.py)."""
CANNOT_VERIFY = (
    *("moe_a2a_backend", "moe_dp_size", "moe_data_parallel_size", "enable_dp_lm_head", "enable_eplb"),
    *("attn_cp_size", "attention_context_parallel_size", "moe_dense_tp_size", "dwdp_size"),
    *("init_expert_location", "ep_num_redundant_experts", "disable_shared_experts_fusion"),
    *("enforce_shared_experts_fusion", "enable_two_batch_overlap", "enable_single_batch_overlap"),
)
"""Arguments with which SGLang cuts or joins weights in other ways than weights/engine_layout.py, so that every engine
would fail the comparison of checksums. SGLang's own loaders cut the tensors of a publish as they cut those of a
folder."""
OFF = (None, False, 0, 1, "0", "1", "none", "trivial", "triton")
"""Values that leave an argument of these at what the project knows."""

MOST_DRAFTS = 24
"""Largest number of tokens in a step of speculative decoding, where SGLang chooses it."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""Arguments that trade the model's distribution for accepted drafts. With 1.0, the default, it is kept."""


def _with_underscores(arguments: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    if len(named) < len(arguments):
        twice = next(name for name in arguments if "-" in name and name.replace("-", "_") in arguments)
        raise ConfigError("server_args", twice, "It is there with underscores, too: remove one of the two.")
    return named


ServerArgs = Annotated[dict[str, Any], AfterValidator(_with_underscores)]
"""Arguments of SGLang by name, with underscores whichever way they were given; true for a bare flag."""


def draft_room(engine: EngineConfig) -> int:
    """Return how many tokens a request needs in the KV cache beyond its own. SGLang allocates twice what a step of
    speculative decoding may add (mem_cache/allocation_sizing.py)."""
    arguments = engine.server_args
    return 2 * (arguments.get("speculative_num_draft_tokens") or MOST_DRAFTS) if speculates(engine) else 0


def speculates(engine: EngineConfig) -> bool:
    """Return whether the engines decode speculatively."""
    return engine.server_args.get("speculative_algorithm") is not None


def check_server_args(config: Config) -> None:
    """Refuse arguments of engines for which there are settings, those with which an engine cannot load or prove new
    weights, and those that do not fit other settings. Raises ConfigError."""
    require(config, _rules(config))
    if config.generates:
        require(config, _speculation_rules(config))
        require(config, _cache_rules(config))


def _rules(config: Config) -> Iterator[Rule]:
    """Yield each rule as field, whether its value breaks it, and the remedy."""
    for name, value in config.engine.server_args.items():
        field, is_on = f"engine.server_args.{name}", value is True or value not in OFF
        yield field, name in INSTEAD, f"Set engine.{INSTEAD.get(name)} instead."
        apart = name == "disaggregation_mode" and value not in (None, "null")
        yield field, apart, "Every engine of a run both prefills and decodes: remove it."
        if config.mode != "train":
            continue
        why = f"SGLang cannot load new weights with it: {CANNOT_LOAD.get(name)}"
        yield field, name in CANNOT_LOAD and is_on, why
        why = "The engines would answer with random weights until the first publish: remove it."
        yield field, name == "load_format" and value == "dummy", why
        why = "SGLang cuts weights in a way that weights.verify does not know: remove it, or set weights.verify=false."
        yield field, name in CANNOT_VERIFY and is_on and config.weights.verify, why


def _speculation_rules(config: Config) -> Iterator[Rule]:
    """Yield the rules of speculative decoding, with which tokens or their experts would silently be wrong."""
    if not speculates(config.engine):
        return
    off, arguments = "remove engine.server_args.speculative_algorithm", config.engine.server_args
    why = f"How many tokens are computed at once depends on the drafts, and so do their last bits: {off}."
    yield "deterministic", config.deterministic, why
    why = f"SGLang moves accepted drafts in the KV cache without their experts, and lacks room for them: {off}."
    yield "algo.routing_replay", config.algo.routing_replay == "R3", why
    for name in THRESHOLDS:
        why = "Tokens would not be the model's: remove it."
        yield f"engine.server_args.{name}", arguments.get(name, 1.0) != 1.0, why
    why = "The engine would load the policy's files into its draft model: set auto, tensor or distributed."
    yield "weights.transport", config.sends_files and arguments["speculative_algorithm"] != "NGRAM", why


def _cache_rules(config: Config) -> Iterator[Rule]:
    """Yield the rules of HiCache, which would keep the caches of old weights for long."""
    storage, flushes = config.engine.server_args.get("hicache_storage_backend"), config.weights.pause_mode != "in_place"
    why = "It keeps prefix caches beyond the run and beyond their weights: remove it."
    yield "engine.server_args.hicache_storage_backend", storage is not None, why
    if config.engine.hicache is None:
        return
    why = "A group's later turns would find caches of old weights in host memory (engine.hicache): set version."
    yield "rollout.cache_key", config.rollout.cache_key == "group" and not flushes, why
    off, replay = "unset engine.hicache", config.algo.routing_replay
    yield "deterministic", config.deterministic, f"It needs whole prefills: {off}."
    why = f"SGLang forgets which experts a token had when its cache moves to host memory: {off}, or set none or R2."
    yield "algo.routing_replay", replay == "R3", why
    why = f"Host caches of engines that release their memory were not tried: {off}."
    yield "cluster.placement", config.cluster.takes_turns, why
