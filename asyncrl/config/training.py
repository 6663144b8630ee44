"""The model, its trainers, and the algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from asyncrl.config.section import Count, Natural, NonNegative, Positive, Section, Share
from asyncrl.errors import ConfigError


class Model(Section):
    """The model to train."""

    path: str
    """An HF folder (config.json, safetensors, tokenizer), or builtin:smollm2-135m, or builtin:tiny."""
    chat_template: str | None
    """A jinja file that replaces the tokenizer's chat template."""


class Optimizer(Section):
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
    """Decay of the mean of gradients."""
    beta2: Share
    """Decay of the mean of their squares."""
    eps: Positive
    """Added to the root of that mean."""
    weight_decay: NonNegative
    """Decoupled weight decay."""
    clip_grad: NonNegative
    """Clip the global gradient norm to this; 0 turns clipping off."""


class Trainer(Section):
    """Megatron: layout, precision, optimizer, and what to do with a bad step."""

    device: Literal["auto", "cpu", "cuda"]
    """Where the ranks run; auto takes CUDA when the machine has it."""
    tensor_parallel: Count
    """Ranks that share each matrix."""
    pipeline_parallel: Count
    """Ranks that share the layers."""
    virtual_pipeline: Count
    """Chunks of layers that each pipeline stage holds, interleaved with those of the other stages; 1: one."""
    data_parallel: Count
    """Replicas that share each batch."""
    expert_parallel: Count
    """Ranks that share the routed experts of a mixture-of-experts layer."""
    expert_tensor_parallel: Count | None
    """Ranks that share each matrix of a routed expert; unset: tensor_parallel."""
    sequence_parallel: bool
    """Split activations along the sequence between the tensor-parallel ranks."""
    dtype: Literal["bfloat16", "float32"]
    """Precision of the weights in forward and backward; the master weights are always float32."""
    micro_batch_tokens: Count
    """Upper limit of packed tokens in one forward pass. A larger group runs alone."""
    share_prompts: bool
    """Run the prompt of a group once and let its completions attend to it (exact; off only to compare)."""
    threads: Count
    """Torch threads of a rank on CPU."""
    optimizer: Optimizer
    on_bad_step: Literal["skip", "stop"]
    """What to do when the gradient norm is not finite or above bad_grad_norm: skip the update, or end the run."""
    bad_grad_norm: Positive | None
    """Gradient norm (before clipping) above which a step counts as exploding; unset: only NaN and infinity."""
    max_bad_steps: Count
    """Under `skip`, end the run after this many bad steps in a row."""
    save_hf_every: Count | None
    """Write the weights as an HF folder every so many steps; unset: only at the end."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @model_validator(mode="after")
    def _layout_is_possible(self) -> Trainer:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("trainer.sequence_parallel", True, "Needs trainer.tensor_parallel of 2 or more.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                "trainer.virtual_pipeline", self.virtual_pipeline, "Needs pipeline_parallel of 2 or more."
            )
        stage, matrix = self.tensor_parallel * self.data_parallel, self.expert_tensor_parallel or self.tensor_parallel
        if stage % (matrix * self.expert_parallel):
            field = "expert_parallel" if stage % matrix == 0 else "expert_tensor_parallel"
            raise ConfigError(
                f"trainer.{field}",
                getattr(self, field),
                f"expert_tensor_parallel × expert_parallel ({matrix * self.expert_parallel}) must divide the {stage} "
                "ranks of a pipeline stage (tensor_parallel × data_parallel): raise trainer.data_parallel or lower it.",
            )
        return self


class Algo(Section):
    """Advantage, loss and correction."""

    advantage: Literal["grpo", "dr_grpo"]
    """Group-relative advantage: divided by the group's standard deviation (grpo) or not (dr_grpo)."""
    loss: Literal["decoupled_ppo", "tis"]
    """decoupled_ppo: clipped surrogate times the capped engine correction; tis: policy gradient times it."""
    clip_low: Share
    """Lower width of the clip: the ratio to the proximal policy stays above 1 - clip_low."""
    clip_high: NonNegative
    """Upper width of the clip: the ratio stays below 1 + clip_high."""
    correction_cap: Positive
    """Cap of the importance weight between the engine's and the trainer's probability (TIS)."""
    aggregation: Literal["token", "sequence", "constant"]
    """Unit of the mean: tokens, sequences, or sequences of `rollout.max_new_tokens` tokens."""
    entropy_bonus: NonNegative
    """Coefficient of the entropy of the policy in the loss."""
