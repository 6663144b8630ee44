"""Checks of the layouts of trainer and engines against the model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from asyncrl.config import Config, TrainerConfig, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.lookup import NOBODY, active, enabled
from asyncrl.models.architectures import check_architecture, megatron_arguments
from asyncrl.models.families import family_of
from asyncrl.settings import Rule, require


def check_model(config: Config, hf: dict[str, Any], gpus: int = 0) -> None:
    """Refuse models and layouts that cannot be built. `hf` is the model folder's config.json, `gpus` the number of each
    machine."""
    check_architecture(hf)
    require(config, _heads(config, hf))
    _check_layers(config.trainer, hf["num_hidden_layers"])
    family = megatron_arguments(hf)
    experts = family.get("num_moe_experts", 0)
    for rules in (
        _serving(config, hf, gpus),
        _shape(config, hf, experts),
        _recompute(config.trainer, hf["num_hidden_layers"], family),
        _features(config.trainer, {**hf, **family}),
        _experts(config.trainer, experts),
        _biases(config.trainer, family, experts, gpus),
        _dispatcher(config.trainer, experts),
    ):
        require(config, rules)
    for one in active(config).values():
        for problem in one.launch().check_model(config, {**hf, **family}, gpus):
            raise problem
    longest = hf.get("max_position_embeddings", 0)
    why = f"Must leave room for a prompt within the model's {longest} positions."
    require(config, [("rollout.max_new_tokens", config.rollout.max_new_tokens >= longest, why)])


def _heads(config: Config, hf: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of ranks that share attention heads."""
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    serves = [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)]
    rows = (heads + 2 * kv_heads) * (hf.get("head_dim") or hf.get("hidden_size", heads) // heads)
    trains = [d for d in serves if rows % d == 0]  # Megatron shares out the rows of queries, keys and values
    for field, degree, allowed in (
        ("trainer", config.trainer.tensor_parallel, trains),
        ("engine", config.engine.parallel.attention, serves),  # SGLang replicates KV heads
    ):
        number, what = (heads, "attention heads") if heads % degree else (kv_heads, "key-value heads")
        why = f"Must divide the model's {number} {what}: one of {allowed}."
        yield f"{field}.tensor_parallel", degree, degree not in allowed, why


def _serving(config: Config, hf: dict[str, Any], gpus: int) -> Iterator[Rule]:
    """Yield the rules of what engines, where there are some, cannot do with models of this family."""
    of = family_of(hf)
    context = int(config.engine.server_args.get("context_length") or hf.get("max_position_embeddings", 0))
    longest = of.serving.longest(hf) or context
    why = (
        f"From position {longest} on, trainers and SGLang compute another function than transformers: set "
        f"+engine.server_args.context_length={longest}."
    )
    yield "engine.server_args.context_length", context, context > longest, why
    if not config.generates:
        return
    for unsupported, why in of.serving.unsupported(hf):
        yield "model.path", unsupported, True, why
    served = on_gpu(config.engine, gpus) or bool(config.engine.urls)
    why = "engines would keep it" if config.trains else "no engine on a CPU computes with them"
    why = f"Trainers read such weights, but {why}: asyncrl-convert dequantize FOLDER OUT, and set OUT."
    refused = bool(hf.get("quantization_config")) and (config.trains or not served)
    yield "model.path", "quantization_config", refused, why


def _shape(config: Config, hf: dict[str, Any], experts: int) -> Iterator[Rule]:
    """Yield the rules of an engine of several groups of experts or several ranks: what SGLang cannot give this model.
    Replicas of attention, pipeline stages and adapters need an extension, which has the rules for them."""
    engine = config.engine
    if engine.expert_parallel > 1:
        field = "engine.expert_parallel"
        yield field, not experts, "The model has no routed experts: set it to 1."
        why = f"Must divide the model's {experts} routed experts."
        yield field, experts % engine.expert_parallel > 0, why
    if engine.tensor_parallel > 1:
        kv_heads = hf.get("num_key_value_heads") or hf["num_attention_heads"]
        family, fuses = hf["architectures"][0], family_of(hf).serving.fuses
        why = f"SGLang, which runs transformers' {family}, cannot divide {kv_heads} key-value heads: lower it."
        yield "engine.tensor_parallel", not fuses and kv_heads % engine.tensor_parallel > 0, why
    why = "No extension that is installed lets engines of this shape take new weights: set 1."
    for field in ("data_parallel", "pipeline_parallel"):
        several = getattr(engine, field) > 1
        yield f"engine.{field}", several and f"engine.{field}" not in enabled(config.extensions), why
    unknown = config.trainer.lora.rank is not None and "trainer.lora.rank" not in enabled(config.extensions)
    yield "trainer.lora.rank", unknown, NOBODY


def _check_layers(trainer: TrainerConfig, layers: int) -> None:
    """Check that pipeline stages and their chunks can share the layers as they are told to, and that none is empty."""
    try:
        chunks = trainer.split.chunk_layers(layers)
    except ValueError as error:
        field, problem = error.args
        remedy = f"The model has {layers} layers, and {problem}: change it, or set trainer.pipeline_split."
        raise ConfigError(f"trainer.{field}", getattr(trainer, field), remedy) from None
    if chunks[-1][-1].stop != layers or not all(len(chunk) for stage in chunks for chunk in stage):
        sizes = [[len(chunk) for chunk in stage] for stage in chunks]
        remedy = f"These are not the model's {layers} layers, at least one in each chunk."
        raise ConfigError("trainer.pipeline_split", sizes, remedy)


def _recompute(trainer: TrainerConfig, layers: int, family: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of units of layers, which divide each chunk, and of modules that the model has."""
    recompute, field = trainer.recompute, "trainer.recompute"
    if recompute.granularity == "full" and recompute.method == "uniform":
        for chunk in (len(chunk) for stage in trainer.split.chunk_layers(layers) for chunk in stage):
            why = f"Must divide the {chunk} layers of a pipeline stage's chunk: set method=block, or a divisor."
            yield f"{field}.num_layers", chunk % recompute.num_layers > 0, why
    if recompute.granularity != "selective":
        return
    experts, latent = family.get("num_moe_experts"), family.get("multi_latent_attention")
    shared = family.get("moe_shared_expert_intermediate_size")
    for module, has in (("moe", experts), ("moe_act", experts), ("shared_experts", shared), ("mla_up_proj", latent)):
        lacks = module in recompute.modules and not has
        yield f"{field}.modules", module, lacks, "The model has no such module: remove it."
    ungrouped = trainer.layers != "transformer_engine"
    why = "Only grouped experts have it: set trainer.layers=transformer_engine, or use moe."
    yield f"{field}.modules", "moe_act", "moe_act" in recompute.modules and ungrouped, why


def _features(trainer: TrainerConfig, model: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of tensor-parallel ranks, which divide every MLP evenly. Heads are checked elsewhere, and the
    vocabulary is padded."""
    if "kv_lora_rank" in model:
        model = {**model, "latent": model["kv_lora_rank"] + model["qk_rope_head_dim"]}
    tensor, expert_tensor = trainer.tensor_parallel, trainer.expert_tensor_parallel or trainer.tensor_parallel
    for field, degree, of, features in (
        ("tensor_parallel", tensor, "an MLP", "intermediate_size"),
        ("tensor_parallel", tensor, "the shared experts", "moe_shared_expert_intermediate_size"),
        ("tensor_parallel", tensor, "the latent queries", "q_lora_rank"),
        ("tensor_parallel", tensor, "the latent keys and values", "latent"),
        ("expert_tensor_parallel", expert_tensor, "a routed expert", "moe_ffn_hidden_size"),
    ):
        size = model.get(features) or 0
        why = f"{degree} ranks cannot share the {size} features of {of} evenly: set it to a divisor."
        yield f"trainer.{field}", size % degree > 0, why


def _experts(trainer: TrainerConfig, experts: int) -> Iterator[Rule]:
    """Yield the rules of expert parallelism, which divides the routed experts of models that have some."""
    for field, off in (("expert_parallel", 1), ("expert_tensor_parallel", None)):
        why = f"The model has no routed experts: set it to {off}."
        yield f"trainer.{field}", not experts and getattr(trainer, field) != off, why
    why = f"Must divide the model's {experts} routed experts."
    yield "trainer.expert_parallel", experts % trainer.expert_parallel > 0, why
    needs = experts and trainer.tensor_parallel > 1 and not trainer.sequence_parallel
    why = "Megatron trains routed experts under trainer.tensor_parallel > 1 only with it: set it to true."
    yield "trainer.sequence_parallel", bool(needs), why


def _biases(trainer: TrainerConfig, family: dict[str, Any], experts: int, gpus: int) -> Iterator[Rule]:
    """Yield the rules of biases of experts, which Megatron 0.16.1 does not divide."""
    biased = bool(experts and family.get("add_bias_linear"))
    divided = trainer.expert_tensor_parallel or trainer.tensor_parallel
    why = "Megatron does not divide experts that have biases: set trainer.expert_tensor_parallel=1."
    yield "trainer.expert_tensor_parallel", divided, biased and divided > 1, why
    why = "Experts with biases were tried with Megatron's own layers alone: set local."
    fused = trainer.layers == "transformer_engine" or (trainer.layers == "auto" and gpus > 0)
    yield "trainer.layers", trainer.layers, biased and fused, why


def _dispatcher(trainer: TrainerConfig, experts: int) -> Iterator[Rule]:
    """Yield the rules of a token dispatcher whose kernels must be installed, and have ranks to exchange tokens
    between."""
    if trainer.token_dispatcher == "alltoall":
        return
    ranks = trainer.expert_parallel * (trainer.expert_tensor_parallel or trainer.tensor_parallel)
    for wrong, why in (
        (not experts, "The model has no routed experts"),
        (ranks == 1, "One rank holds all experts"),
        (trainer.device == "cpu", "Its kernels are for GPUs"),
        (find_spec("deep_ep") is None, "The package deep_ep, which has its kernels, is not installed"),
    ):
        yield "trainer.token_dispatcher", wrong, f"{why}: set alltoall."
