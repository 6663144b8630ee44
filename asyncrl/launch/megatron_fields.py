"""Check of trainer.megatron against Megatron's own dataclasses, and against what the trainer promises. The dataclasses
are parsed and not imported, because the launcher imports no torch."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError

CLASSES = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
LATENT = ("transformer/transformer_config.py", "MLATransformerConfig")
"""Fields that only models with latent attention have."""

MODEL = "It follows from the model, which engines and checkpoints share: change the model's config.json."
ATTENTION = "It has no effect: attention over packs is asyncrl's own (trainer/tree_attention.py)."
FUSED = "It has no effect: the layers are asyncrl's own where Megatron would fuse (trainer/mlp.py, trainer/model.py)."
SHAPES = "Packs differ in length, and a graph needs equal shapes."
DENOMINATOR = "Loss and gradient would depend on micro-batches: each step has one denominator (docs/algorithms.md)."
ENGINES = "Tokens would go to other experts, or to none, than in the engines, whose probabilities are corrected for."
SHARDED = "Weights are published and saved from whole parameters, which it would shard."
TE_LAYERS = "It acts on TransformerEngine's layers only, and no test has tried it there with packs (docs/layers.md)."
LAYERS = "Set trainer.layers, which decides it (trainer/model.py)."
QUANTIZED = "Publishing, checkpoints and resets read the parameters' own memory, which would hold quantized bytes."
USER_BUFFERS = "TransformerEngine's user buffers have one fixed number of rows, and packs differ in length."
MASTERS = "Masters would live inside FusedAdam, where resets and checkpoints do not reach them (trainer/optimizer.py)."
PLANNED = "The trainer decides it from its layout and the kinds of its buffers (trainer/network.py)."

REFUSED: dict[str, tuple[tuple[str, str], ...]] = {  # per section: what matches the whole field name, and the remedy
    "transformer": (
        ("tensor_model_parallel_size", "Set trainer.tensor_parallel."),
        ("pipeline_model_parallel_size", "Set trainer.pipeline_parallel."),
        ("virtual_pipeline_model_parallel_size", "Set trainer.virtual_pipeline."),
        ("context_parallel_size", "Set trainer.context_parallel."),
        ("expert_model_parallel_size", "Set trainer.expert_parallel."),
        ("expert_tensor_parallel_size", "Set trainer.expert_tensor_parallel."),
        ("sequence_parallel", "Set trainer.sequence_parallel."),
        ("fp16|bf16|params_dtype|pipeline_dtype|enable_autocast|autocast_dtype", "Set trainer.dtype."),
        ("recompute_.*|moe_layer_recompute", "Set trainer.recompute."),
        ("deterministic_mode", "Set deterministic=true, which holds for all parts of a run."),
        ("calculate_per_token_loss|moe_aux_loss_coeff|moe_z_loss_coeff|moe_router_load_balancing_type", DENOMINATOR),
        ("variable_seq_lengths", "Packs differ in length: it must be true."),
        (".*_dropout", "Log-probabilities would be those of another network than the engines': it must be 0."),
        (
            "moe_router_(fusion|force_load_balancing|topk_limited_devices|padding_.*)|moe_token_drop.*"
            "|moe_expert_capacity_factor|moe_pad_expert_input_to_capacity|moe_input_jitter_eps",
            ENGINES,
        ),
        ("moe_enable_routing_replay", "Set algo.routing_replay, which knows packs."),
        ("moe_token_dispatcher_type|moe_flex_dispatcher_backend|moe_enable_deepep", "Set trainer.token_dispatcher."),
        ("moe_grouped_gemm|moe_use_legacy_grouped_gemm|transformer_impl|bias_activation_fusion", LAYERS),
        (
            "attention_.*|softmax_.*|window_.*|flash_decode|masked_softmax_fusion|cp_comm_type|.*context_parallel.*",
            ATTENTION,
        ),
        ("apply_query_key_layer_scaling|max_seqlen_per_dp_cp_rank|log_max_attention_logit|qk_(l2|clip).*", ATTENTION),
        (
            "bias_.*_fusion|persist_layer_norm|memory_efficient_layer_norm|cross_entropy_.*",
            FUSED,
        ),
        (".*cuda_graph.*", SHAPES),
        ("fp8|fp8_recipe", "Set trainer.fp8."),
        ("fp[48]_param.*", QUANTIZED),
        ("tp_comm.*", USER_BUFFERS),
        (
            "(fp8|fp4|use_kitchen|kitchen).*|quant_recipe|delay_wgrad_compute|use_te_.*|tp_only_amax_red",
            TE_LAYERS,
        ),
        ("symmetric_ar_type|batch_invariant_mode|num_layers_at_.*|first_last_layers_bf16", TE_LAYERS),
        (
            "cpu_offloading.*|fine_grained_activation_offloading|offload_modules|min_offloaded_tensor_size",
            "Set trainer.activation_offload, which knows packs.",
        ),
        ("overlap_p2p_comm.*|batch_p2p_.*|use_ring_exchange_p2p|deallocate_pipeline_outputs|timers|.*_func", PLANNED),
        (
            "gradient_accumulation_fusion|barrier_with_L1_time|microbatch_group_size_per_vp_stage|async_tensor_model_parallel_allreduce",
            PLANNED,
        ),
        ("pipeline_model_parallel_layout|.*_pipeline_split|_.*", PLANNED),
        (
            "overlap_moe_expert_parallel_comm|ep_overlap_.*|moe_extended_tp|defer_embedding_.*|wgrad_deferral_limit",
            PLANNED,
        ),
        ("perform_initialization|use_cpu_initialization|init_.*|embedding_init_.*", "Weights are read from the model."),
        (
            "(inference|mamba|linear|dsa|mtp|heterogeneous|hetereogenous|mrope|mlp_chunks).*|(is_hybrid|use_mamba)_.*",
            MODEL,
        ),
        ("use_inference_.*|experimental_attention_.*|test_mode|no_rope_freq|cache_mla_latents", MODEL),
        ("num_.*|hidden_size|ffn_hidden_size|kv_channels|.*layernorm.*|normalization|.*residual_connection.*", MODEL),
        ("add_.*|gated_linear_unit|glu_linear_offset|activation_.*|rotary_.*|original_max_.*|beta_.*|mscale.*", MODEL),
        (
            "moe_(router_(?!dtype)|shared_expert_|latent_|ffn_|layer_).*|moe_apply_probs_on_input|multi_latent_attention",
            MODEL,
        ),
        (".*_lora_rank|qk_.*|v_head_dim|rope_type", MODEL),
    ),
    "ddp": (
        ("overlap_grad_reduce", "Set trainer.overlap_grad_reduce."),
        ("overlap_param_gather", "Set trainer.overlap_param_gather."),
        ("grad_reduce_in_fp32", "Gradients are always accumulated in float32."),
        ("use_distributed_optimizer|num_distributed_optimizer_instances|align_param_gather|delay_wgrad.*", PLANNED),
        ("check_for_.*", "A bad gradient is handled by trainer.on_bad_step and trainer.bad_grad_norm."),
        ("average_in_collective|gradient_reduce_div_fusion", DENOMINATOR),
        (".*fsdp.*|.*sharding_strategy|suggested_.*|preserve_fp32_weights|disable_symmetric.*", SHARDED),
        ("fp8.*|.*mxfp8.*|keep_fp8.*", QUANTIZED),
    ),
    "optimizer": (
        ("(lr|min_lr|adam_beta[12]|adam_eps|weight_decay|clip_grad)", "Set the field of trainer.optimizer."),
        ("fp16|bf16|params_dtype|main_.*_dtype|.*loss_scale.*|hysteresis", "Set trainer.dtype."),
        ("optimizer|sgd_.*|muon_.*", "Moments are published to checkpoints as AdamW's: other optimizers have others."),
        ("optimizer_.*offload.*|use_torch_optimizer_for_cpu_offload|pin_cpu_.*", "Set trainer.optimizer.offload."),
        ("use_precision_aware_optimizer|exp_avg_.*", "Set trainer.optimizer.moments_dtype."),
        ("store_param_remainders", MASTERS),
        ("use_distributed_optimizer|overlap_.*|timers|barrier_.*|log_num_zeros_in_grad", PLANNED),
        ("decoupled_(min_)?lr", "Learning rates of single layers are not supported."),
        ("fp8.*|.*mxfp8.*", QUANTIZED),
    ),
}
SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}


def check_fields(trainer: TrainerConfig, family: Mapping[str, Any]) -> None:
    """Refuse unknown fields, values of other types, and what breaks a promise. `family` holds the arguments that follow
    from the model."""
    for section in CLASSES:
        given: dict[str, Any] = getattr(trainer.megatron, section)
        if not given:
            continue
        known = fields(section, latent=bool(family.get("multi_latent_attention")))
        for name, value in given.items():
            field = f"trainer.megatron.{section}.{name}"
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {near[0]}?" if near else "See the dataclass in megatron.core."
                raise ConfigError(field, value, f"Megatron {section} settings have no such field. {remedy}")
            if reason := MODEL if name in family else refusal(section, name):
                raise ConfigError(field, value, f"{reason} Remove it.")
            if not _fits(value, known[name]):
                raise ConfigError(field, value, f"Megatron declares it as {ast.unparse(known[name])}.")


def refusal(section: str, name: str) -> str | None:
    """Return why a field cannot be set, or None if it can."""
    return next((reason for pattern, reason in REFUSED[section] if re.fullmatch(pattern, name)), None)


@cache
def fields(section: str, *, latent: bool = False) -> dict[str, ast.expr]:
    """Return the declared type of every field of a section."""
    spec = find_spec("megatron.core")
    assert spec
    assert spec.origin
    classes = (*CLASSES[section], *([LATENT] if latent and section == "transformer" else []))
    folder = Path(spec.origin).parent
    return {name: kind for file, owner in classes for name, kind in _declared(folder / file, owner)}


def _declared(file: Path, owner: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, field.annotation


def _fits(value: Any, kind: ast.expr) -> bool:
    """Return whether a value has a declared type. A type that no configuration file can hold fits nothing."""
    if isinstance(kind, ast.Constant):
        return value is None and kind.value is None
    if isinstance(kind, ast.Name):
        return isinstance(value, SCALARS.get(kind.id, ())) and (not isinstance(value, bool) or kind.id == "bool")
    if not isinstance(kind, ast.Subscript):
        return False
    outer, inner = ast.unparse(kind.value), kind.slice
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Literal":
        return value in [ast.literal_eval(part) for part in parts]
    if outer in ("List", "list"):
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    return (outer == "Optional" and value is None) or (
        outer in ("Optional", "Union") and any(_fits(value, part) for part in parts)
    )
