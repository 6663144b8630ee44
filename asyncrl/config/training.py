"""The model, its trainers, and the algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
    context_parallel: Count
    """Ranks that share the tokens of each sequence, for long ones; each attends with its own to everyone's."""
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
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @model_validator(mode="after")
    def _layout_is_possible(self) -> Trainer:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("trainer.sequence_parallel", True, "Needs trainer.tensor_parallel of 2 or more.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                "trainer.virtual_pipeline", self.virtual_pipeline, "Needs pipeline_parallel of 2 or more."
            )
        stage = self.tensor_parallel * self.context_parallel * self.data_parallel
        matrix = self.expert_tensor_parallel or self.tensor_parallel
        if stage % (matrix * self.expert_parallel):
            field = "expert_parallel" if stage % matrix == 0 else "expert_tensor_parallel"
            raise ConfigError(
                f"trainer.{field}",
                getattr(self, field),
                f"expert_tensor_parallel × expert_parallel ({matrix * self.expert_parallel}) must divide the {stage} "
                "ranks of a pipeline stage (tensor_parallel × context_parallel × data_parallel): raise "
                "trainer.data_parallel or lower it.",
            )
        return self


class Algo(Section):
    """Advantage, loss and corrections."""

    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "maxrl",
        "pass_at_k",
        "grpo_passk",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "grpo_turn",
    ]
    """Estimator of advantages: one function of algo/advantage.py, which names its paper."""
    discount: Share
    """Decay of later rewards: per token in reinforce_pp, per turn in grpo_turn."""
    pass_k: Count
    """Of pass_at_k: the samples of which one must be right."""
    correct_above: float
    """Of pass_at_k: a sample is right when its reward is above this."""
    loss: Literal["ppo", "gspo", "gspo_token", "cispo", "sapo", "policy_gradient", "minirl", "dppo_tv", "topr", "vespo"]
    """Policy loss: one function of algo/loss.py, which names its paper."""
    clip_low: Share
    """Lower width of the clip: the ratio to the proximal policy stays above 1 - clip_low."""
    clip_high: NonNegative
    """Upper width of the clip: the ratio stays below 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Where the advantage A is negative, the loss stays below -A times this; unset: it has no bound."""
    dppo_trust: Positive
    """Of dppo_tv: how far a token's probability may have moved from what the engine wrote it with."""
    sapo_up: Positive
    """Of sapo: temperature of the gate where the advantage is positive."""
    sapo_down: Positive
    """Of sapo: temperature of the gate elsewhere."""
    proximal: Literal["start", "log_linear", "behaviour"]
    """What clipping is measured from. start: the weights that the batch's steps start from (with one step they are the
    current ones, and cost no pass of their own); log_linear: between the engine's and the current log-probabilities by
    the tokens' age; behaviour: the engine's, in the place of any correction."""
    correction: Literal["tis", "tis_sequence", "icepop"] | None
    """Weight for the gap between engine and trainer; unset: none."""
    correction_cap: Positive
    """Largest weight: above it a token's is cut (tis), or the token masked (icepop)."""
    correction_floor: NonNegative
    """Smallest weight, in the same way."""
    mask_sequence: tuple[NonNegative, Positive] | None
    """Train only sequences whose weights multiply to a number between these; unset: all."""
    mask_geometric: tuple[NonNegative, Positive] | None
    """Train only sequences whose weights' geometric mean lies between these, as in [0.999, 1.001]; unset: all."""
    mask_opsm: NonNegative | None
    """Leave out sequences of negative advantage that have become less likely by more than this, nats per token."""
    mask_lag: Natural | None
    """Leave out tokens that are older than this, in versions."""
    aggregation: Literal["token", "sequence", "constant"]
    """Unit of the mean: tokens, sequences, or sequences of `rollout.max_new_tokens` tokens."""
    entropy_bonus: NonNegative
    """Coefficient of the entropy of the policy in the loss."""
    mini_batches: Count
    """Optimizer steps that share a batch, each with its part of the groups."""
    epochs: Count
    """How often a batch is gone through."""

    @property
    def steps(self) -> int:
        """Optimizer steps of one batch."""
        return self.mini_batches * self.epochs

    @model_validator(mode="after")
    def _counts_nothing_twice(self) -> Algo:
        itself = self.loss in ("dppo_tv", "topr", "vespo")  # tests hold this to LOSSES
        if self.correction and (itself or self.proximal == "behaviour"):
            with_what = f"algo.loss={self.loss}" if itself else f"algo.proximal={self.proximal}"
            raise ConfigError(
                "algo.correction", self.correction, f"{with_what} weighs this gap already: set algo.correction=null."
            )
        if self.loss in ("gspo", "gspo_token") and self.aggregation != "sequence":
            raise ConfigError(
                "algo.aggregation",
                self.aggregation,
                f"algo.loss={self.loss} is one of sequences: set sequence.",
            )
        return self
