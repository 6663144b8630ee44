"""Check of the shape of an engine (engine.*_parallel) against the model and the run."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config
from asyncrl.config.rules import require
from asyncrl.models.families import FAMILIES, family_of
from asyncrl.models.vision import image_shape

REPLICATED = tuple(name for name, family in FAMILIES.items() if family.serving.replicates)
"""Families whose attention SGLang 0.5.21 can replicate within an engine; others divide their heads over all ranks."""


def check_shape(config: Config, hf: dict[str, Any], experts: int) -> None:
    """Refuse engines of a shape that SGLang cannot give this model, or in which it cannot do what the run needs."""
    engine, family = config.engine, hf["architectures"][0]
    serving, kv_heads = family_of(hf).serving, hf.get("num_key_value_heads") or hf["num_attention_heads"]
    tied, sees = hf.get("tie_word_embeddings", False), image_shape(hf) is not None
    publishes, adapters = config.mode == "train", config.serves_adapters
    rules: list[tuple[str, Any, str]] = [
        ("expert_parallel", not experts, "The model has no routed experts: set it to 1."),
        ("expert_parallel", experts % engine.expert_parallel, f"Must divide the model's {experts} routed experts."),
        ("data_parallel", family not in REPLICATED, f"SGLang replicates the attention of {REPLICATED} alone: set 1."),
        ("data_parallel", adapters, "Adapters in engines were tried with one replica alone: set 1."),
        ("data_parallel", tied, "A tied output layer was not tried with several replicas: set 1."),
        (
            "tensor_parallel",
            not serving.fuses and kv_heads % engine.tensor_parallel,
            f"SGLang, which runs transformers' {family}, cannot divide {kv_heads} key-value heads: lower it.",
        ),
        ("pipeline_parallel", not serving.stages, f"SGLang has no stages of {family}: set 1."),
        ("pipeline_parallel", sees, "SGLang's stages of models with images were not tried: set 1."),
        ("pipeline_parallel", adapters, "Adapters in engines were tried with one stage alone: set 1."),
        (
            "pipeline_parallel",
            tied and not serving.tied_stages,
            f"SGLang's {family} has no tied output layer on the last stage: set 1.",
        ),
        (
            "pipeline_parallel",
            hf["num_hidden_layers"] < engine.pipeline_parallel,
            f"There are only {hf['num_hidden_layers']} layers: lower it.",
        ),
        (
            "pipeline_parallel",
            publishes and config.weights.pause_mode not in ("abort", "drain"),
            "SGLang does not pause the steps that are between stages: set weights.pause_mode=abort or drain.",
        ),
        (
            "pipeline_parallel",
            config.algo.routing_replay == "R3",
            "Engines cannot report routed experts of other stages: set 1, or algo.routing_replay=none.",
        ),
    ]
    several = ((field, bool(wrong) and getattr(engine, field) > 1, remedy) for field, wrong, remedy in rules)
    require(engine, several, prefix="engine.")
