"""The model, its trainers, and the algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from asyncrl.config.section import AboveOne, Bounds, Count, Dtype, Natural, NonNegative, Positive, Section, Share
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
    dtype: Dtype
    """Precision of the weights in forward and backward; the master weights are always float32. auto: bfloat16 on GPUs,
    on CPUs what they multiply faster."""
    micro_batch_tokens: Count
    """Upper limit of packed tokens in one forward pass. A larger group runs alone."""
    logit_rows: Count
    """Upper limit of tokens whose logits over the vocabulary exist at a time; those of more are made twice."""
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
        "none",
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
        "gae",
        "turn_discounted",
        "turn_loo",
        "gigpo",
        "dr_gigpo",
    ]
    """Estimator of advantages: one function of algo/advantage.py or, for turns, algo/credit.py, which names its paper.
    none: rewards count for nothing, as in pure distillation."""
    discount: Share
    """Decay of later rewards: per token in reinforce_pp and gae, per turn in grpo_turn, turn_discounted, turn_loo and
    the gigpos; the others know whole episodes only."""
    gae_lambda: Share
    """Of gae: decay of later errors of the critic; 1 takes whole returns."""
    critic_path: str | None
    """Of gae: HF folder of the policy's architecture that the critic starts from; unset: model.path."""
    critic_lr: Positive
    """Of gae: peak learning rate of the critic."""
    critic_warmup: Natural
    """Of gae: first batches that train the critic alone."""
    value_clip: Positive | None
    """Of gae: how far a value may move in one step before its loss is cut; unset: as far as it likes."""
    pass_k: Count
    """Of pass_at_k: the samples of which one must be right."""
    correct_above: float
    """Of pass_at_k: a sample is right when its reward is above this."""
    step_weight: NonNegative
    """Of the gigpos: weight of the turn among those in one state, beside that of the episode."""
    overlong_buffer: Count | None
    """Tokens below rollout.max_new_tokens from which on an answer's reward falls, as in DAPO, and that of an episode by
    its longest; unset: it does not."""
    overlong_penalty: NonNegative
    """How far it has fallen at rollout.max_new_tokens."""
    length_penalty: NonNegative
    """Taken off the reward of an answer of rollout.max_new_tokens, and of a shorter one in proportion."""
    reward_clip: Positive | None
    """Rewards are cut at this and at its negative; unset: they are not."""
    normalize_rewards: bool
    """Give the rewards of a batch mean 0 and standard deviation 1 before advantages are made of them."""
    mask_truncated: bool
    """Leave out answers that ended by length; their rewards still count for their siblings."""
    loss: Literal[
        "ppo",
        "gspo",
        "gspo_token",
        "cispo",
        "sapo",
        "policy_gradient",
        "minirl",
        "dppo_tv",
        "topr",
        "vespo",
        "m2po",
    ]
    """Policy loss: one function of algo/loss.py, which names its paper."""
    clip_low: Share
    """Lower width of the clip: the ratio to the proximal policy stays above 1 - clip_low."""
    clip_high: NonNegative
    """Upper width of the clip: the ratio stays below 1 + clip_high."""
    dual_clip: AboveOne | None
    """Where the advantage A is negative, the loss stays below -A times this; unset: it has no bound."""
    dppo_trust: Positive
    """Of dppo_tv: how far a token's probability may have moved from what the engine wrote it with."""
    sapo_up: Positive
    """Of sapo: temperature of the gate where the advantage is positive."""
    sapo_down: Positive
    """Of sapo: temperature of the gate elsewhere."""
    m2_threshold: Positive
    """Of m2po: largest mean square of the logarithm of the ratio to what the engine wrote a token with; the tokens that
    lie furthest out are left out until the others meet it."""
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
    mask_sequence: Bounds | None
    """Train only sequences whose weights multiply to a number between these; unset: all."""
    mask_geometric: Bounds | None
    """Train only sequences whose weights' geometric mean lies between these, as in [0.999, 1.001]; unset: all."""
    mask_opsm: NonNegative | None
    """Leave out sequences of negative advantage that have become less likely by more than this, nats per token."""
    mask_lag: Natural | None
    """Leave out tokens that are older than this, in versions."""
    aggregation: Literal["token", "sequence", "constant"]
    """Unit of the mean: tokens, sequences, or sequences of `rollout.max_new_tokens` tokens."""
    entropy_bonus: NonNegative
    """Coefficient of the entropy of the policy in the loss."""
    kl_coefficient: NonNegative
    """Weight of the KL to the reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "ratio"]
    """Estimator of it: one function of algo/kl.py, which tells what each is good for."""
    kl_place: Literal["reward", "loss"]
    """Taken off the reward of each token, or added to its loss."""
    kl_meter_every: Natural
    """Measure the KL to the reference every so many batches, as kl/reference; 0: only where kl_coefficient needs it."""
    distill_coefficient: NonNegative
    """On-policy distillation: weight of the KL to the teacher (teacher.model); 0: off. Alone with advantage=none."""
    distill_place: Literal["advantage", "loss"]
    """Taken off the advantage of each token, where clipping bounds it like the rest, or added to its loss as the
    estimator `ratio` (algo/kl.py). Without clipping and discount, both have one gradient (algo/distill.py)."""
    distill_discount: Share
    """In the advantage: each token answers for its own difference to the teacher, and for the later ones with this
    decay per token; 0: for its own alone."""
    reference: Literal["weights", "teacher"]
    """Who the reference of the KL is. weights: frozen ones in the trainer; teacher: the teacher's engines, which score
    every episode anyway, so that the trainer holds no second weights and makes no second pass."""
    reference_path: str | None
    """Of weights: an HF folder of the policy's architecture; unset: the model that training starts from."""
    reference_offload: bool
    """Keep the reference's weights in host memory between its passes."""
    trust_region: Positive | None
    """Leave out a batch's further optimizer steps once the policy has moved this far from where they started, as the
    mean over tokens of KL(start || policy); unset: no bound."""
    routing_replay: Literal["none", "R2", "R3"]
    """Experts that a mixture-of-experts model's routers are given in the policy's passes. R2: those that they chose
    where the batch's optimizer steps start; R3: those that the engines chose for each token (docs/algorithms.md)."""
    replay_groups: Natural
    """Past groups that are trained again with each batch, as long as rollout.max_staleness allows; 0: none."""
    reset_every: Count | None
    """Draw the weights back towards those that training started from, and forget the optimizer's moments, every so many
    batches (LoRR, arXiv 2508.06412: against what high replay overfits to); unset: never."""
    reset_share: Share
    """How far: 0 keeps the weights, 1 returns to the start."""
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
        itself = self.loss in ("dppo_tv", "topr", "vespo", "m2po")  # tests hold this to LOSSES
        if self.correction and (itself or self.proximal == "behaviour"):
            with_what = f"algo.loss={self.loss}" if itself else f"algo.proximal={self.proximal}"
            raise ConfigError(
                "algo.correction", self.correction, f"{with_what} weighs this gap already: set algo.correction=null."
            )
        if self.kl_coefficient and self.kl_place == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "algo.kl_estimator", "k1", "Its gradient is zero in expectation: take k2 or ratio, or kl_place=reward."
            )
        if self.reference == "teacher" and self.reference_path:
            raise ConfigError(
                "algo.reference_path", self.reference_path, "algo.reference=teacher needs no weights: leave it unset."
            )
        if self.distill_discount and self.distill_place == "loss":
            raise ConfigError(
                "algo.distill_discount", self.distill_discount, "It belongs to algo.distill_place=advantage: set 0."
            )
        if self.advantage == "none" and not self.distill_coefficient:
            raise ConfigError(
                "algo.advantage", "none", "Nothing would be learnt: set algo.distill_coefficient, or another estimator."
            )
        if self.advantage == "none" and self.kl_coefficient and self.kl_place == "reward":
            raise ConfigError("algo.kl_place", "reward", "algo.advantage=none reads no rewards: set loss.")
        if self.routing_replay == "R2" and self.steps == 1:
            raise ConfigError(
                "algo.routing_replay",
                "R2",
                "One optimizer step replays nothing: raise mini_batches, or set none.",
            )
        if self.loss in ("gspo", "gspo_token") and self.aggregation != "sequence":
            raise ConfigError(
                "algo.aggregation",
                self.aggregation,
                f"algo.loss={self.loss} is one of sequences: set sequence.",
            )
        return self

    @model_validator(mode="after")
    def _acts(self) -> Algo:
        """What is set must be able to do what it says."""
        for mask in ("mask_sequence", "mask_geometric"):
            bounds = getattr(self, mask)
            if bounds and bounds[0] > bounds[1]:
                raise ConfigError(f"algo.{mask}", bounds, "Nothing lies between these: give the lower one first.")
            if bounds and self.proximal == "behaviour":
                remedy = "algo.proximal=behaviour leaves it no gap to measure: set start, or leave it unset."
                raise ConfigError(f"algo.{mask}", bounds, remedy)
        if self.correction_floor > self.correction_cap:
            remedy = f"Must not exceed algo.correction_cap ({self.correction_cap})."
            raise ConfigError("algo.correction_floor", self.correction_floor, remedy)
        if self.advantage in ("maxrl", "pass_at_k"):
            for shaping in ("overlong_buffer", "length_penalty", "normalize_rewards"):
                if value := getattr(self, shaping):
                    remedy = f"algo.advantage={self.advantage} takes rewards as the task gave them: turn it off."
                    raise ConfigError(f"algo.{shaping}", value, remedy)
        return self
