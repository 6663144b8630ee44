"""Rules between settings, by subject. What concerns one section alone is a limit of its class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from asyncrl import lookup
from asyncrl.algo.advantage import ADVANTAGES, AdvantageTraits
from asyncrl.algo.loss import LOSSES, LossTraits
from asyncrl.config.running import TRANSPORTS, USABLE
from asyncrl.settings import Choice, Rule, require, value_of

if TYPE_CHECKING:
    from asyncrl.config import Config


def check_settings(config: Config) -> None:
    """Refuse settings that exclude each other, also by the rules of extensions. Raises ConfigError."""
    for rules in (
        _extended,
        _modes,
        _lengths,
        _evaluation,
        _server_args,
        _speculation,
        _host_caches,
        _batch_parts,
        _overlap,
        _shared_gpus,
        _tasks,
        _group_sizes,
    ):
        require(config, rules(config))
    for one in lookup.active(config).values():
        for problem in one.check(config):
            raise problem
    require(config, _signal(config))


def _lengths(config: Config) -> Iterator[Rule]:
    """Yield the rules of numbers that bound each other."""
    bound, lead = config.rollout.max_staleness, config.rollout.effective_lead
    why = f"Must not exceed rollout.max_staleness ({bound}): lower it, or leave it unset."
    yield "rollout.lead", lead, lead > bound, why
    buffer, longest = config.algo.shaping.overlong_buffer, config.rollout.max_new_tokens
    why = f"Must not exceed rollout.max_new_tokens ({longest})."
    yield "algo.shaping.overlong_buffer", (buffer or 0) > longest, why
    optimizer = config.trainer.optimizer
    why = f"Must not exceed trainer.optimizer.lr ({optimizer.lr})."
    yield "trainer.optimizer.min_lr", optimizer.min_lr > optimizer.lr, why
    last = optimizer.decay_steps or config.run.max_steps
    decays = optimizer.schedule != "constant"
    why = f"Must be below the end of the decay ({last})."
    yield "trainer.optimizer.warmup_steps", decays and optimizer.warmup_steps >= last, why


def _modes(config: Config) -> Iterator[Rule]:
    """Yield the rules of what a run does as a whole."""
    why = (
        "With deterministic=true, weights must not change while engines generate: set 0, or record an asynchronous run "
        "(record=true) and replay it."
    )
    yield "rollout.max_staleness", config.deterministic and bool(config.rollout.max_staleness) and config.generates, why
    why = f"mode={config.mode} trains nothing: remove it."
    yield "checkpoint.every", bool(config.checkpoint.every) and not config.trains, why


def _extended(config: Config) -> Iterator[Rule]:
    """Yield the rules of what extensions add: names to those of the core, and what only an extension can do."""
    active = lookup.active(config).values()
    references = (name for one in active for name in one.references)
    for field, own, others in (
        ("mode", ("train",), lookup.offered("modes", config.extensions)),
        ("weights.transport", TRANSPORTS, lookup.offered("transports", config.extensions)),
        ("cluster.launcher", ("local",), lookup.offered("clusters", config.extensions)),
        ("cluster.placement", ("separate", "shared"), lookup.offered("placements", config.extensions)),
        ("algo.kl.reference", ("weights",), references),
    ):
        names = [*own, *others]
        why = f"Must be one of {', '.join(names)}: no extension that is installed has another."
        yield field, value_of(config, field) not in names, why
    enabled = lookup.enabled(config.extensions)
    yield "record", config.record and "record" not in enabled, lookup.NOBODY
    auto = config.generates and config.rollout.max_running_groups == "auto"
    why = "No extension that is installed has auto: set a number, or null."
    yield "rollout.max_running_groups", auto and "rollout.max_running_groups" not in enabled, why


def _evaluation(config: Config) -> Iterator[Rule]:
    """Yield the rules of evaluation sets."""
    sets = config.eval.sets
    why = f"The sets {sorted(sets)} would get no questions: raise it."
    yield "eval.questions", bool(sets) and not config.eval.questions, why
    twice = sorted(sets.keys() & config.mixture.keys())
    why = "A task has this name and its own held-out questions: choose another name."
    yield "eval.sets", twice[0] if twice else "", bool(twice), why


# -- engines ---------------------------------------------------------------------------------------------------

INSTEAD = {
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "ep_size": "expert_parallel",
    "expert_parallel_size": "expert_parallel",
    "ep": "expert_parallel",
    "dp_size": "data_parallel",
    "data_parallel_size": "data_parallel",
    "dp": "data_parallel",
    "enable_dp_attention": "data_parallel",
    "pp_size": "pipeline_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "pp": "pipeline_parallel",
    "enable_hierarchical_cache": "hicache",
    "hicache_size": "hicache",
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
    "moe_a2a_backend",
    "moe_dp_size",
    "moe_data_parallel_size",
    "enable_dp_lm_head",
    "enable_eplb",
    "attn_cp_size",
    "attention_context_parallel_size",
    "moe_dense_tp_size",
    "dwdp_size",
    "init_expert_location",
    "ep_num_redundant_experts",
    "disable_shared_experts_fusion",
    "enforce_shared_experts_fusion",
    "enable_two_batch_overlap",
    "enable_single_batch_overlap",
)
"""Arguments with which SGLang cuts or joins weights in other ways than weights/engine_layout.py, so that every engine
would fail the comparison of checksums. SGLang's own loaders cut the tensors of a publish as they cut those of a
folder."""
OFF = (None, False, 0, 1, "0", "1", "none", "trivial", "triton")
"""Values that leave an argument of these at what the project knows."""
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""Arguments that trade the model's distribution for accepted drafts. With 1.0, the default, it is kept."""


def _server_args(config: Config) -> Iterator[Rule]:
    """Yield the rules of SGLang's own arguments: those that a run sets itself or cannot do with, and those with which
    an engine cannot load or prove new weights."""
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


def _speculation(config: Config) -> Iterator[Rule]:
    """Yield the rules of speculative decoding, with which tokens would silently be wrong."""
    if not config.generates or not config.engine.speculates:
        return
    off, arguments = "remove engine.server_args.speculative_algorithm", config.engine.server_args
    why = f"How many tokens are computed at once depends on the drafts, and so do their last bits: {off}."
    yield "deterministic", config.deterministic, why
    for name in THRESHOLDS:
        why = "Tokens would not be the model's: remove it."
        yield f"engine.server_args.{name}", arguments.get(name, 1.0) != 1.0, why
    why = "The engine would load the policy's files into its draft model: set auto, tensor or distributed."
    yield "weights.transport", config.sends_files and arguments["speculative_algorithm"] != "NGRAM", why


def _host_caches(config: Config) -> Iterator[Rule]:
    """Yield the rules of HiCache, which would keep the caches of old weights for long."""
    if not config.generates:
        return
    storage, flushes = config.engine.server_args.get("hicache_storage_backend"), config.weights.pause_mode != "in_place"
    why = "It keeps prefix caches beyond the run and beyond their weights: remove it."
    yield "engine.server_args.hicache_storage_backend", storage is not None, why
    if config.engine.hicache is None:
        return
    why = "A group's later turns would find caches of old weights in host memory (engine.hicache): set version."
    yield "rollout.cache_key", config.rollout.cache_key == "group" and not flushes, why
    off = "unset engine.hicache"
    yield "deterministic", config.deterministic, f"It needs whole prefills: {off}."


# -- batches and publishes that overlap with other work ----------------------------------------------------------

WHOLE = "Change it, or set trainer.batch_parts=1."


def _batch_parts(config: Config) -> Iterator[Rule]:
    """Yield the rules of a batch that is trained before it is complete."""
    parts, groups, algo = config.trainer.batch_parts, config.rollout.batch_groups, config.algo
    if parts == 1:
        return
    why = f"A batch has rollout.batch_groups={groups} groups: set at most {groups}."
    yield "trainer.batch_parts", parts > groups, why
    yield "algo.mini_batches", algo.mini_batches > 1, f"Parts are accumulated into a single step. {WHOLE}"
    yield "algo.epochs", algo.epochs > 1, f"Parts are accumulated into a single step. {WHOLE}"
    yield "algo.shaping.normalize", algo.shaping.normalize, f"It needs the whole batch. {WHOLE}"
    why = f"What is dropped is decided when a batch is complete. {WHOLE}"
    yield "rollout.over_age", config.rollout.over_age == "drop", why
    why = f"Timing decides which groups a part consists of. {WHOLE}"
    yield "deterministic", config.deterministic and config.mode == "train", why
    yield from _traits(config, ADVANTAGES.traits(algo.advantage), LOSSES.traits(algo.loss))


def check_traits(config: Config, advantage: AdvantageTraits, loss: LossTraits) -> None:
    """Refuse an estimator or a loss that needs the whole batch, if it comes in parts. Raises ConfigError."""
    require(config, _traits(config, advantage, loss))


def _traits(config: Config, advantage: AdvantageTraits, loss: LossTraits) -> Iterator[Rule]:
    """Yield the rules of an estimator and a loss that see a batch in parts. The traits of a user's own function are
    known to the trainer only."""
    in_parts = config.trainer.batch_parts > 1
    why = f"It needs the whole batch. {WHOLE}"
    yield "algo.advantage", in_parts and (advantage.whole_batch or advantage.critic), why
    yield "algo.loss", in_parts and loss.selection is not None, f"Its choice of tokens needs the whole batch. {WHOLE}"


def _overlap(config: Config) -> Iterator[Rule]:
    """Yield the rules of a version that is published while the next batch is trained."""
    weights, rollout = config.weights, config.rollout
    if not weights.overlap:
        return
    off = ", or set weights.overlap=false."
    why = f"No weights are published without a trainer (weights.overlap): set mode=train{off}"
    yield "mode", not config.trains, why
    why = f"The weights must be copied before the trainer changes them (weights.overlap): set full or auto{off}"
    yield "weights.staging", weights.staging == "stream", why
    field, lead = "rollout.lead" if rollout.max_staleness else "rollout.max_staleness", rollout.effective_lead
    why = f"The next batch is admitted only after the publish (weights.overlap): set at least 1{off}"
    yield field, lead, lead < 1, why


# -- engines and trainers on the same GPUs -------------------------------------------------------------------------


def _shared_gpus(config: Config) -> Iterator[Rule]:
    """Yield the rules of engines that use the trainers' GPUs, in whatever way."""
    if not config.cluster.shares_gpus:
        return
    placed, room = f"cluster.placement={config.cluster.placement}", config.trainer_fraction
    why = f"mode={config.mode} has no GPUs to share: set separate."
    yield "cluster.placement", config.mode != "train", why
    why = f"NCCL refuses two ranks on one GPU ({placed}): set auto, tensor or disk."
    yield "weights.transport", config.weights.transport == "distributed", why
    why = f"With {placed} engines share the GPUs of this run's trainers, so that it must start them: remove them."
    yield "engine.urls", bool(config.engine.urls), why
    device = config.trainer.device
    why = f"With {placed} engines and trainers share their devices: set it to trainer.device ({device})."
    yield "engine.device", config.engine.device != device, why
    why = f"With {placed} the trainers get what is left of {USABLE}: set less."
    yield "engine.memory_fraction", room is not None and room <= 0, why


# -- tasks and groups ------------------------------------------------------------------------------------------


def _tasks(config: Config) -> Iterator[Rule]:
    """Yield the rules of where questions come from."""
    for name, task in (config.mixture | config.eval.sets).items():
        field = config.field_of(name)
        no_file = task.train_file is None and not (name in config.eval.sets and task.eval_file is not None)
        why = "task.kind=file needs the path of a .jsonl or .parquet file."
        yield f"{field}.train_file", task.kind == "file" and no_file, why


@cache
def _alone() -> tuple[str, ...]:
    """Return the advantage estimators that work without siblings in a group, also those of extensions."""
    return tuple(name for name in ADVANTAGES if ADVANTAGES.traits(Choice(name=name)).alone)


def _group_sizes(config: Config) -> Iterator[Rule]:
    """Yield the rule of estimators that compare the samples of a group."""
    advantage = config.algo.advantage
    compares = not advantage.is_own and advantage.name not in _alone()
    others = ", ".join(_alone())
    why = f"algo.advantage={advantage.name} compares siblings: set 2 or more, or algo.advantage to one of {others}."
    yield "rollout.group_size", compares and config.rollout.group_size == 1, why
    for name, task in config.mixture.items():
        yield f"{config.field_of(name)}.group_size", compares and task.group_size == 1, why


def _signal(config: Config) -> Iterator[Rule]:
    """Yield the rule of a run that must learn from something."""
    learns = any(one.signal for one in lookup.active(config).values())
    why = "Nothing would be learned: choose another estimator, or an extension's own signal, as distillation."
    yield "algo.advantage", config.algo.advantage.name == "none" and not learns, why
