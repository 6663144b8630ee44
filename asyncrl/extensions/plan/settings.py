"""Conversion of a model's config and the run's settings to the planner's data classes."""

from __future__ import annotations

import math
from typing import Any

from asyncrl.config import Config, TrainerConfig, streams
from asyncrl.config.lora import LoraConfig
from asyncrl.extensions.lora.bases import bases
from asyncrl.extensions.lora.rules import engine_slots
from asyncrl.extensions.plan.activations import Recompute, Training
from asyncrl.extensions.plan.adapters import Adapters
from asyncrl.extensions.plan.shapes import ParallelLayout
from asyncrl.lookup import active

LATENT_DOWN = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
"""Down projections of latent attention, which TransformerEngine's layers do not share over tensor-parallel ranks."""


def layout_of(trainer: TrainerConfig) -> ParallelLayout:
    """Return the degrees of parallelism."""
    return ParallelLayout(
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        chunks=trainer.virtual_pipeline,
        context=trainer.context_parallel,
        data=trainer.data_parallel,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel or trainer.tensor_parallel,
        sequence=trainer.sequence_parallel,
        split=trainer.split if trainer.pipeline_parallel > 1 else None,
        whole=LATENT_DOWN if trainer.layers == "transformer_engine" else (),
    )


def told_of_memory(config: Config) -> dict[str, int]:
    """Return what extensions change in the memory of a run (LaunchHooks.memory)."""
    return {name: size for one in active(config).values() for name, size in one.launch().memory(config).items()}


def training_of(config: Config, *, gpu: bool) -> Training:
    """Return the settings that determine memory. A sample longer than a micro-batch forms its own, so a micro-batch may
    have rollout.max_new_tokens tokens."""
    trainer, algo = config.trainer, config.algo
    adapters = adapters_of(trainer.lora, len(config.agents.adapters))
    refers = algo.kl.reference == "weights" and algo.measures_reference and adapters is None
    two_buckets = streams(config.weights, gpu=gpu) or config.sends_files
    told = told_of_memory(config)
    return Training(
        dtype=trainer.dtype,
        tokens=max(trainer.micro_batch_tokens, config.rollout.max_new_tokens),
        logit_rows=trainer.logit_rows,
        frozen=int(refers and not algo.kl.reference_offload),
        critic=algo.has_critic,
        bucket=config.weights.bucket_mb << 20 if two_buckets else 0,
        publishes=config.mode == "train",
        fused_norms=gpu,
        recompute=recompute_of(trainer),
        moments=trainer.optimizer.moments_dtype,
        offload=gpu and bool(told.get("states_away")),
        layers_held=told.get("layers_held", math.inf) if gpu else math.inf,
        fp8=trainer.fp8 is not None,
        tower=bool(told.get("tower_trained")),
        adapters=adapters,
        versions=config.keeps_versions,
    )


def adapters_of(lora: LoraConfig, count: int = 1) -> Adapters | None:
    """Return the adapters that a run trains, `count` for each layer; None: it trains all weights."""
    if lora.rank is None:
        return None
    targets = () if lora.targets == "all" else tuple(lora.targets)
    base = bases().get(lora.base)
    return Adapters(lora.rank, targets, base.bytes if base else None, dropout=lora.dropout > 0, count=count)


def served_adapters(config: Config) -> dict[str, Any]:
    """Return planner.memory.engine_rank's arguments about adapters."""
    if not config.keeps_versions:
        return {}
    return {"adapters": adapters_of(config.trainer.lora), "slots": engine_slots(config)}


def recompute_of(trainer: TrainerConfig) -> Recompute:
    """Return what is recomputed in backward."""
    recompute = trainer.recompute
    return Recompute(recompute.granularity, recompute.method, recompute.num_layers, tuple(recompute.modules))
