"""Configuration of Megatron's own mechanisms: number formats of layers, memory, pipeline stages."""

from __future__ import annotations

from typing import Literal

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
