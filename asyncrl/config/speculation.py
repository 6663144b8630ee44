"""Settings of engines that decode speculatively (engine.speculative) or cache in host memory (engine.hicache)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config, EngineConfig, TrainerConfig

ALGORITHMS = {"ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
"""SGLang's names of what engine.speculative can be."""
MOST_DRAFTS = 24
"""Largest number of tokens in a step of speculative decoding, where SGLang chooses it."""
DRAFT_MODELS = ("eagle", "eagle3")
"""Kinds of speculation with a draft model of its own, which is not trained."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""SGLang's arguments that trade the target's distribution for accepted drafts. With 1.0, the default, it is kept."""


def speculative_args(engine: EngineConfig) -> dict[str, Any]:
    """Return the arguments of an engine that decodes speculatively; none otherwise.

    With a number of draft tokens, a draft model proposes a chain of them (a top-k of 1), so that every step but the
    first token is a draft. Without one, SGLang chooses by the model.
    """
    if engine.speculative == "none":
        return {}
    count = engine.draft_tokens
    chain = {"speculative_num_steps": count - 1, "speculative_eagle_topk": 1} if count else {}
    return {
        "speculative_algorithm": ALGORITHMS[engine.speculative],
        "speculative_draft_model_path": engine.draft_model and str(Path(engine.draft_model).expanduser()),
        "speculative_num_draft_tokens": count,
        **({} if engine.speculative == "ngram" else chain),
    }


def draft_room(engine: EngineConfig) -> int:
    """Return how many tokens a request needs in the KV cache beyond its own. SGLang allocates twice what a step of
    speculative decoding may add (mem_cache/allocation_sizing.py)."""
    return 0 if engine.speculative == "none" else 2 * (engine.draft_tokens or MOST_DRAFTS)


def check_speculation(config: Config) -> None:
    """Refuse settings that do not fit speculative decoding or HiCache. Raises ConfigError."""
    if config.mode != "replay":
        require(config, _rules(config))


def _rules(config: Config) -> Iterator[Rule]:
    """Yield each rule as field, whether its value breaks it, and the remedy."""
    if config.trainer.mtp:
        yield from _training_rules(config.trainer, config.algo.routing_replay)
    engine, kind = config.engine, f"engine.speculative={config.engine.speculative}"
    drafts, none = engine.speculative not in ("none", "ngram"), engine.speculative == "none"
    needed = engine.speculative in DRAFT_MODELS
    remedy = f"{kind} needs the folder of a draft model." if needed else f"{kind} has no draft model: remove it."
    yield "engine.draft_model", needed != (engine.draft_model is not None), remedy
    count = engine.draft_tokens
    yield "engine.draft_tokens", none and count is not None, f"{kind} drafts nothing: remove it."
    yield "engine.draft_tokens", count == 1, "The first of them is no draft: set 2 or more, or remove it."
    yield from _cache_rules(config)
    if none:
        return
    off = "set engine.speculative=none"
    why = f"How many tokens are computed at once depends on the drafts, and so do their last bits: {off}."
    yield "deterministic", config.deterministic, why
    why = f"SGLang moves accepted drafts in the KV cache without their experts, and lacks room for them: {off}."
    yield "algo.routing_replay", config.algo.routing_replay == "R3", why
    for name in THRESHOLDS:
        value = engine.server_args.get(name, 1.0)
        yield f"engine.server_args.{name}", value != 1.0, "Tokens would not be the model's: remove it."
    transport, placement = config.weights.transport, config.cluster.placement
    why = f"The engine would load the model's files into its draft model ({kind}): set auto, tensor or distributed."
    yield "weights.transport", drafts and transport in ("disk", "delta"), why
    why = f"Not tried with speculative decoding: {off}, or 1."
    yield "engine.data_parallel", engine.data_parallel > 1, why
    yield "engine.pipeline_parallel", engine.pipeline_parallel > 1, why
    why = f"Engines that only prefill or decode were not tried with speculative decoding: {off}."
    yield "engine.prefill_count", engine.disaggregated, why
    codes = config.engine.quantization
    why = f"The draft model would be quantized, too ({kind}): set {codes}_simulated, or {off}."
    yield "engine.quantization", drafts and config.engine.holds_codes, why
    why = f"A draft model does not survive the release of an engine's memory ({kind}): {off}, or use ngram."
    yield "cluster.placement", drafts and placement == "colocated", why
    yield "cluster.lend", drafts and config.cluster.lend, why


def _cache_rules(config: Config) -> Iterator[Rule]:
    """Yield the rules of HiCache, which would keep the caches of old weights for long."""
    storage, flushes = config.engine.server_args.get("hicache_storage_backend"), config.weights.pause_mode != "in_place"
    why = "It keeps prefix caches beyond the run and beyond their weights: remove it."
    yield "engine.server_args.hicache_storage_backend", storage is not None, why
    if config.engine.hicache is None:
        return
    why = "A group's later turns would find caches of old weights in host memory (engine.hicache): set version."
    yield "rollout.cache_key", config.rollout.cache_key == "group" and not flushes, why
    off, replay, cluster = "unset engine.hicache", config.algo.routing_replay, config.cluster
    yield "deterministic", config.deterministic, f"It needs whole prefills: {off}."
    why = f"SGLang forgets which experts a token had when its cache moves to host memory: {off}, or set none or R2."
    yield "algo.routing_replay", replay == "R3", why
    why = f"Host caches of engines that release their memory were not tried: {off}."
    yield "cluster.placement", cluster.placement == "colocated", why
    yield "cluster.lend", cluster.lend, why


def _training_rules(trainer: TrainerConfig, replay: str) -> Iterator[Rule]:
    """Yield the rules of trainer.mtp, which trainer/mtp.py supports in a whole model of Megatron's own layers."""
    off = "or set trainer.mtp=null"
    for field, value, supported in (
        ("trainer.pipeline_parallel", trainer.pipeline_parallel, 1),
        ("trainer.context_parallel", trainer.context_parallel, 1),
        ("trainer.layers", trainer.layers, "local"),
        ("trainer.lora.rank", trainer.lora.rank, None),
        ("trainer.activation_offload", trainer.activation_offload, False),
        ("algo.routing_replay", replay, "none"),
    ):
        wanted = "null" if supported is None else str(supported).lower()
        yield field, value != supported, f"trainer.mtp supports {wanted} only: set that, {off}."
