"""Configuration of Megatron's own mechanisms: number formats of layers, memory, pipeline stages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Section


class Fp8Config(Section):
    """FP8 matrix products in TransformerEngine's layers. Parameters and published weights stay in bfloat16. Recipes
    compute every scale anew, so that a checkpoint needs none; TransformerEngine's delayed scaling is not offered,
    because its history of maxima would be lost on resume."""

    format: Literal["e4m3", "hybrid"]
    """Number format; hybrid: e5m2 for gradients in backward, e4m3 for all else."""
    recipe: Literal["tensorwise", "blockwise", "mxfp8"]
    """Scaling: one scale per tensor, per block of 128 (Hopper), or per 32 elements (Blackwell)."""

    @property
    def row_multiple(self) -> int:
        """Return the number of rows by which the rows of every product must be divisible, as Megatron's
        get_fp8_align_size has it."""
        return 32 if self.recipe == "mxfp8" else 16


class RecomputeConfig(Section):
    """Recomputation of activations in backward instead of keeping them (activation checkpointing). The fields have the
    meaning of Megatron's recompute_granularity, recompute_method, recompute_num_layers and recompute_modules."""

    granularity: Literal["none", "full", "selective"]
    """none: keep all activations; full: recompute whole layers from their input; selective: recompute only `modules`.
    """
    method: Literal["uniform", "block"]
    """With full. uniform: recompute all layers, in units of `num_layers`, and keep the input of each unit; block:
    recompute the first `num_layers` layers of each chunk one by one, and keep the activations of the others."""
    num_layers: Count
    """With full: see `method`. A larger unit keeps fewer inputs, but all activations of a unit at once in backward."""
    modules: list[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "moe_act"]]
    """With selective: what is recomputed. core_attn: attention without its projections; layernorm: the two norms of a
    layer; mla_up_proj: the up projections of latent attention, which saves memory together with core_attn; mlp: dense
    MLPs; moe: layers with routed experts; shared_experts: only their shared experts; moe_act: the activation of grouped
    experts."""

    @model_validator(mode="after")
    def _recomputes_something(self) -> RecomputeConfig:
        if self.granularity == "selective" and not self.modules:
            raise ConfigError("trainer.recompute.modules", self.modules, "Name a module, or set granularity=none.")
        return self


class PipelineSplitConfig(Section):
    """Division of the model's layers among pipeline stages. By default all stages have equally many. The fields have
    the meaning of Megatron's num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage,
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split."""

    first_stage_layers: Count | None
    """Layers of the first stage; unset: as many as each stage whose number is not set."""
    last_stage_layers: Count | None
    """Layers of the last stage; unset: as many as each stage whose number is not set."""
    account_for_embedding: bool
    """Count the embedding as a layer, so that the first stage has one layer less."""
    account_for_loss: bool
    """Count the output layer and the loss as a layer, so that the last stage has one layer less."""

    @model_validator(mode="after")
    def _divides_in_one_way(self) -> PipelineSplitConfig:
        numbers = self.first_stage_layers or self.last_stage_layers
        if numbers and (self.account_for_embedding or self.account_for_loss):
            raise ConfigError(
                "trainer.pipeline_split",
                numbers,
                "Megatron takes the layers of first and last stage, or account_for_*, and not both: remove one.",
            )
        return self


class TransformerFields(Section):
    """Fields of Megatron's TransformerConfig that may be set; unset: as the trainer has them."""

    apply_rope_fusion: bool | None
    """Rotate queries and keys in TransformerEngine's fused kernel. unset: with its layers, except in latent attention.
    """
    fused_single_qkv_rope: bool | None
    """Rotate queries and keys in one fused kernel, before they are split."""
    moe_permute_fusion: bool | None
    """Sort tokens by their experts in TransformerEngine's fused kernel."""
    moe_deepep_num_sms: Count | None
    """Multiprocessors of a GPU that DeepEP uses, with trainer.token_dispatcher=deepep."""
    disable_bf16_reduced_precision_matmul: bool | None
    """Sum products of bfloat16 matrices in float32 throughout."""
    disable_parameter_transpose_cache: bool | None
    """Keep no transposes of weights in FP8."""
    distribute_saved_activations: bool | None
    """Divide recomputed layers' inputs among the ranks of tensor parallelism."""
    clone_scatter_output_in_embedding: bool | None
    """Copy the embedding's output under sequence parallelism, so that the whole of it can be freed."""
    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None
    """Library that sends activations between pipeline stages."""


class DdpFields(Section):
    """Fields of Megatron's DistributedDataParallelConfig that may be set; unset: as the trainer has them."""

    bucket_size: Count | None
    """Elements of a bucket of gradients or parameters."""
    pad_buckets_for_high_nccl_busbw: bool | None
    """Pad buckets to sizes at which NCCL is fast."""
    reduce_scatter_with_fp32_accumulation: bool | None
    """Sum gradients over replicas in float32, whatever their own format."""
    nccl_ub: bool | None
    """Register the buffers of gradients and parameters with NCCL."""


class OptimizerFields(Section):
    """Fields of Megatron's OptimizerConfig that may be set; unset: as the trainer has them."""

    decoupled_weight_decay: bool | None
    """AdamW's weight decay; false: that of Adam, in the gradient."""
    apply_wd_to_qk_layernorm: bool | None
    """Weight decay of the norms of queries and keys, too."""


ELSEWHERE = {
    "tensor_model_parallel_size": "trainer.tensor_parallel",
    "pipeline_model_parallel_size": "trainer.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "trainer.virtual_pipeline",
    "context_parallel_size": "trainer.context_parallel",
    "expert_model_parallel_size": "trainer.expert_parallel",
    "expert_tensor_parallel_size": "trainer.expert_tensor_parallel",
    "sequence_parallel": "trainer.sequence_parallel",
    **dict.fromkeys(("fp16", "bf16", "params_dtype"), "trainer.dtype"),
    **dict.fromkeys(
        (f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")), "trainer.recompute"
    ),
    **dict.fromkeys(("transformer_impl", "moe_grouped_gemm"), "trainer.layers"),
    **dict.fromkeys(("fp8", "fp8_recipe"), "trainer.fp8"),
    **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading"), "offload.activations"),
    **dict.fromkeys(("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"), "trainer.token_dispatcher"),
    "moe_enable_routing_replay": "algo.routing_replay",
    "deterministic_mode": "deterministic",
    "overlap_grad_reduce": "trainer.overlap_grad_reduce",
    "overlap_param_gather": "trainer.overlap_param_gather",
    **dict.fromkeys(
        ("lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"), "trainer.optimizer"
    ),
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"), "trainer.optimizer.moments_dtype"
    ),
    "optimizer_cpu_offload": "trainer.optimizer.offload",
}
"""Fields of Megatron's that have a setting here, and that setting."""


class MegatronConfig(Section):
    """Fields of megatron-core's own dataclasses that have no setting here. Others would break what the trainer promises
    (docs/parallelism.md)."""

    transformer: TransformerFields
    ddp: DdpFields
    optimizer: OptimizerFields

    @model_validator(mode="before")
    @classmethod
    def _may_be_set(cls, values: Any) -> Any:
        known: dict[str, type[Section]] = {
            "transformer": TransformerFields,
            "ddp": DdpFields,
            "optimizer": OptimizerFields,
        }
        for section, given in values.items() if isinstance(values, dict) else ():
            fields = known[section].model_fields if section in known else given
            for name in given:
                if name not in fields:
                    only = f"Only {', '.join(fields)} may be set (docs/parallelism.md): remove it."
                    remedy = f"Set {ELSEWHERE[name]} instead." if name in ELSEWHERE else only
                    raise ConfigError(f"trainer.megatron.{section}.{name}", given[name], remedy)
        return values
