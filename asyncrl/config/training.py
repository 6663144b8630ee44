"""Configuration of the model and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from asyncrl.config.lora import LoraConfig
from asyncrl.config.megatron import Fp8Config, PipelineSplitConfig, RecomputeConfig
from asyncrl.config.secret_values import Parameters
from asyncrl.errors import ConfigError
from asyncrl.parallel import PipelineSplit
from asyncrl.settings import Count, Dtype, Natural, NonNegative, Positive, Rule, Section, Share, require

MOST_BETA = 0.99
"""Largest decay rate of moments in bfloat16. Numbers in bfloat16 differ by a share of at most 2^-7 = 0.0078 from their
neighbors, and a smaller change than half of that may be rounded away."""


class ModelConfig(Section):
    """The model to train."""

    path: str
    """HF folder (config.json, safetensors, tokenizer), builtin:smollm2-135m, builtin:tiny or builtin:tiny_vision, or
    the name of a model of the Hugging Face Hub, as Qwen/Qwen3-0.6B, which is downloaded once."""
    chat_template: str | None
    """Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: Parameters
    """Variables of the chat template, such as enable_thinking=false of Qwen3's."""

    @model_validator(mode="after")
    def _leaves_the_rest(self) -> ModelConfig:
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"):
            if name in self.chat_template_kwargs:
                remedy = "asyncrl sets it for each chat: remove it."
                raise ConfigError(f"model.chat_template_kwargs.{name}", self.chat_template_kwargs[name], remedy)
        return self


class OptimizerConfig(Section):
    """AdamW with fp32 master weights, and its learning-rate schedule."""

    lr: Positive
    """Peak learning rate."""
    min_lr: NonNegative
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the decay after the warm-up."""
    warmup_steps: Natural
    """Steps of linear warm-up from 0."""
    decay_steps: Count | None
    """Step at which min_lr is reached; unset: run.max_steps."""
    beta1: Share
    """Decay rate of the gradient's running mean (first moment)."""
    beta2: Share
    """Decay rate of the squared gradient's running mean (second moment)."""
    eps: Positive
    """Added to the square root of the second moment."""
    weight_decay: NonNegative
    """Decoupled weight decay."""
    clip_grad: NonNegative
    """Clip the global gradient norm to this; 0 turns clipping off."""
    moments_dtype: Literal["float32", "bfloat16"]
    """Number format of the two moments. bfloat16 saves 4 bytes per parameter, and needs GPUs with TransformerEngine,
    whose FusedAdam computes in float32 and rounds what it keeps (Megatron's use_precision_aware_optimizer)."""

    @model_validator(mode="after")
    def _moments_can_move(self) -> OptimizerConfig:
        if self.moments_dtype == "bfloat16" and max(self.beta1, self.beta2) > MOST_BETA:
            field = "beta1" if self.beta1 > MOST_BETA else "beta2"
            remedy = (
                f"A moment in bfloat16, of 8 significant bits, would round a change of 1 - {field} of itself away, and "
                f"never decrease: set at most {MOST_BETA}, or trainer.optimizer.moments_dtype=float32."
            )
            raise ConfigError(f"trainer.optimizer.{field}", getattr(self, field), remedy)
        return self


class TrainerConfig(Section):
    """Megatron trainer: parallel layout, precision, optimizer, and handling of bad steps."""

    device: Literal["auto", "cpu", "cuda"]
    """Device of the ranks; auto uses CUDA if the machine has it."""
    tensor_parallel: Count
    """Tensor-parallel ranks, which share each weight matrix."""
    pipeline_parallel: Count
    """Pipeline-parallel ranks (stages), which share the layers."""
    virtual_pipeline: Count
    """Chunks of layers per pipeline stage, interleaved with those of the other stages; 1: no interleaving."""
    pipeline_split: PipelineSplitConfig
    context_parallel: Count
    """Context-parallel ranks, which share the tokens of each sequence, for long sequences; each rank's queries attend
    to the keys of all ranks."""
    data_parallel: Count
    """Data-parallel replicas, which share each batch."""
    expert_parallel: Count
    """Expert-parallel ranks, which share the routed experts of a mixture-of-experts layer."""
    expert_tensor_parallel: Count | None
    """Tensor-parallel ranks of each routed expert's matrices; unset: tensor_parallel."""
    token_dispatcher: Literal["alltoall", "deepep"]
    """How the tokens of mixture-of-experts layers reach the experts of other ranks: by all-to-all, or by the kernels of
    the package deep_ep (Megatron's flex dispatcher with this backend; GPUs only)."""
    sequence_parallel: bool
    """Split activations along the sequence dimension between the tensor-parallel ranks."""
    dtype: Dtype
    """Precision of the weights in forward and backward; the master weights are always float32. auto: bfloat16 on GPUs;
    on CPUs the format with the faster matrix multiplication."""
    layers: Literal["auto", "transformer_engine", "local"]
    """Layers of the model: TransformerEngine's fused ones with grouped experts, or Megatron's own. auto: those of
    TransformerEngine on GPUs where it is installed, else local. Weights and checkpoints are the same."""
    fp8: Fp8Config | None
    """FP8 recipe of TransformerEngine's layers; unset: products in dtype. Needs GPUs and bfloat16."""
    lora: LoraConfig
    micro_batch_tokens: Count
    """Maximum number of packed tokens in one forward pass. A larger group forms a micro-batch of its own."""
    batch_parts: Count
    """Number of parts of a batch, each of which is trained as soon as its groups are ready, while others are still
    generated. Their gradients add up to that of the batch, for one optimizer step. 1: training begins when the batch is
    complete. More raises throughput where the trainer waits for stragglers (docs/rollouts.md)."""
    logit_rows: Count
    """Maximum number of tokens whose vocabulary logits are in memory at a time; those beyond it are recomputed in
    backward."""
    share_prompts: bool
    """Run the prompt of a group once and let all its completions attend to it (exact; disable it only for
    comparison)."""
    recompute: RecomputeConfig
    overlap_grad_reduce: bool
    """Reduce the gradients of a bucket over replicas while backward computes the others (Megatron's
    overlap_grad_reduce)."""
    overlap_param_gather: bool
    """Gather the new parameters of a bucket from the distributed optimizer's shards while forward runs (Megatron's
    overlap_param_gather). After a batch's last step they are gathered at once, because they are published next."""
    grad_bucket_size: Count | None
    """Elements of a bucket of gradients or parameters; unset: as Megatron chooses it (its bucket_size)."""
    threads: Count
    """Number of torch threads per rank on CPU."""
    optimizer: OptimizerConfig
    on_bad_step: Literal["skip", "stop"]
    """Action when the gradient norm is not finite or exceeds bad_grad_norm: skip the update, or end the run."""
    bad_grad_norm: Positive | None
    """Gradient norm (before clipping) above which a step counts as bad; unset: only NaN and infinity do."""
    max_bad_steps: Count
    """With `skip`, end the run after this many consecutive bad steps."""
    save_hf_every: Count | None
    """Write the weights as an HF folder every this many steps; unset: only at the end."""

    @property
    def split(self) -> PipelineSplit:
        """Return how pipeline stages share the layers."""
        own = self.pipeline_split
        numbers = own.first_stage_layers, own.last_stage_layers
        counts = own.account_for_embedding, own.account_for_loss
        return PipelineSplit(self.pipeline_parallel, self.virtual_pipeline, *numbers, *counts)

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @model_validator(mode="after")
    def _layout_is_possible(self) -> TrainerConfig:
        require(self, self._rules(), prefix="trainer.")
        return self

    def _rules(self) -> Iterator[Rule]:
        one_rank, one_stage = self.tensor_parallel == 1, self.pipeline_parallel == 1
        why = "Needs trainer.tensor_parallel of 2 or more."
        yield "sequence_parallel", self.sequence_parallel and one_rank, why
        shown = self.fp8.format if self.fp8 else None
        why = "Needs trainer.dtype=bfloat16: set it, or fp8=null."
        yield "fp8", shown, shown is not None and self.dtype == "float32", why
        yield "virtual_pipeline", self.virtual_pipeline > 1 and one_stage, "Needs pipeline_parallel of 2 or more."
        alone = self.data_parallel * self.context_parallel == 1
        why = "There are no replicas: set trainer.data_parallel of 2 or more."
        yield "overlap_grad_reduce", self.overlap_grad_reduce and alone, why
        why = "Needs trainer.overlap_grad_reduce=true."
        yield "overlap_param_gather", self.overlap_param_gather and not self.overlap_grad_reduce, why
        shares, why = self.pipeline_split.model_dump(), "Needs pipeline_parallel of 2 or more."
        yield "pipeline_split", shares, one_stage and self.split != PipelineSplit(), why
        stage = self.tensor_parallel * self.context_parallel * self.data_parallel
        matrix = self.expert_tensor_parallel or self.tensor_parallel
        why = (
            f"expert_tensor_parallel × expert_parallel ({matrix * self.expert_parallel}) must divide the {stage} ranks "
            "of a pipeline stage (tensor_parallel × context_parallel × data_parallel): raise trainer.data_parallel or "
            "lower it."
        )
        field = "expert_parallel" if stage % matrix == 0 else "expert_tensor_parallel"
        yield field, stage % (matrix * self.expert_parallel) > 0, why
