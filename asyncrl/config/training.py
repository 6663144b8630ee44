"""Configuration of the model, the trainer and the algorithm."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator, model_validator

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES, LossTraits
from asyncrl.config.lora import LoraConfig
from asyncrl.config.megatron import Fp8Config, MegatronConfig, PipelineSplitConfig, RecomputeConfig
from asyncrl.errors import ConfigError
from asyncrl.parallel import PipelineSplit
from asyncrl.settings import Bounds, Choice, Count, Dtype, Natural, NonNegative, Positive, Section, Share

MOST_BETA = 0.99
"""Largest decay rate of moments in bfloat16. Numbers in bfloat16 differ by a share of at most 2^-7 = 0.0078 from their
neighbors, and a smaller change than half of that may be rounded away."""


class ModelConfig(Section):
    """The model to train."""

    path: str
    """HF folder (config.json, safetensors, tokenizer), or builtin:smollm2-135m, or builtin:tiny."""
    chat_template: str | None
    """Jinja file that replaces the tokenizer's chat template."""


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
    offload: bool
    """Keep master weights and moments in host memory, except during a step. Costs two copies of them per step."""

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
    token_dispatcher: Literal["alltoall", "deepep", "hybridep"]
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
    logit_rows: Count
    """Maximum number of tokens whose vocabulary logits are in memory at a time; those beyond it are recomputed in
    backward."""
    share_prompts: bool
    """Run the prompt of a group once and let all its completions attend to it (exact; disable it only for
    comparison)."""
    recompute: RecomputeConfig
    activation_offload: bool
    """Keep what layers save for backward in host memory until backward needs it, so that a rank holds the activations
    of two layers. With recompute.granularity=full these are their inputs only."""
    megatron: MegatronConfig
    overlap_grad_reduce: bool
    """Reduce the gradients of a bucket over replicas while backward computes the others (Megatron's
    overlap_grad_reduce); bucket_size in trainer.megatron.ddp is the size of a bucket."""
    overlap_param_gather: bool
    """Gather the new parameters of a bucket from the distributed optimizer's shards while forward runs (Megatron's
    overlap_param_gather). After a batch's last step they are gathered at once, because they are published next."""
    threads: Count
    """Number of torch threads per rank on CPU."""
    optimizer: OptimizerConfig
    on_bad_step: Literal["skip", "stop"]
    """Action when the gradient norm is not finite or exceeds bad_grad_norm: skip the update, or end the run."""
    bad_grad_norm: Positive | None
    """Gradient norm (before clipping) above which a step counts as bad; unset: only NaN and infinity do."""
    max_bad_steps: Count
    """With `skip`, end the run after this many consecutive bad steps."""
    profile: list[Count]
    """Steps of which every rank writes a trace of torch's profiler into profile/ of the run folder, and on GPUs a
    snapshot of its memory: [3, 10]."""
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
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("trainer.sequence_parallel", True, "Needs trainer.tensor_parallel of 2 or more.")
        if self.fp8 and self.dtype == "float32":
            raise ConfigError("trainer.fp8", self.fp8.format, "Needs trainer.dtype=bfloat16: set it, or fp8=null.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                "trainer.virtual_pipeline", self.virtual_pipeline, "Needs pipeline_parallel of 2 or more."
            )
        if self.overlap_grad_reduce and self.data_parallel * self.context_parallel == 1:
            raise ConfigError(
                "trainer.overlap_grad_reduce", True, "There are no replicas: set trainer.data_parallel of 2 or more."
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ConfigError("trainer.overlap_param_gather", True, "Needs trainer.overlap_grad_reduce=true.")
        if self.pipeline_parallel == 1 and self.split != PipelineSplit():
            raise ConfigError(
                "trainer.pipeline_split", self.pipeline_split.model_dump(), "Needs pipeline_parallel of 2 or more."
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


class CriticConfig(Section):
    """Critic of algo.advantage=gae."""

    path: str | None
    """HF folder that the critic is initialized from, with the policy's architecture; unset: model.path."""
    lr: Positive
    """Peak learning rate."""
    warmup: Natural
    """Number of initial batches that only train the critic."""
    value_clip: Positive | None
    """Clip range of the value loss, the largest change of a value in one step; unset: no clipping."""


class ShapingConfig(Section):
    """Changes to the rewards of a batch before advantages are computed."""

    overlong_buffer: Count | None
    """Length in tokens of DAPO's soft-penalty window below rollout.max_new_tokens; an episode is penalized by its
    longest answer. unset: no penalty."""
    overlong_penalty: NonNegative
    """Penalty at rollout.max_new_tokens; it grows linearly from 0 across the window."""
    length_penalty: NonNegative
    """Length penalty: subtracted from the reward of an answer of rollout.max_new_tokens, and proportionally from
    shorter ones."""
    clip: Positive | None
    """Clip rewards to plus or minus this; unset: no clipping."""
    normalize: bool
    """Normalize the rewards of a batch to mean 0 and standard deviation 1."""
    mask_truncated: bool
    """Exclude answers that were truncated at the length limit from the loss; their rewards still count for their
    siblings."""


class MaskConfig(Section):
    """Masks of tokens and sequences whose mismatch between engine and trainer is too large."""

    sequence: Bounds | None
    """Only train sequences whose product of importance weights lies within these bounds; unset: all."""
    geometric: Bounds | None
    """Only train sequences whose geometric mean of importance weights lies within these bounds, such as [0.999, 1.001];
    unset: all."""
    opsm: NonNegative | None
    """Off-policy sequence mask: drop sequences with a negative advantage that have become less likely by more than
    this, in nats per token; unset: none."""
    lag: Natural | None
    """Mask tokens older than this, in versions; unset: none."""


class KLConfig(Section):
    """KL divergence from the reference model."""

    coefficient: NonNegative
    """Coefficient of the KL; 0: off."""
    estimator: Literal["k1", "k2", "k3", "ratio"]
    """Estimator of the KL: a function in algo/kl.py, which describes the use of each."""
    place: Literal["reward", "loss"]
    """Subtract the KL from the reward of each token, or add it to the token's loss."""
    measure_every: Natural
    """Measure the KL every this many batches, as kl/reference; 0: only if the coefficient needs it."""
    reference: Literal["weights", "teacher"]
    """Reference model. weights: frozen weights in the trainer; teacher: the teacher's engines, which score every
    episode anyway, so that the trainer needs no second copy of the weights and no second forward pass."""
    reference_path: str | None
    """With reference=weights: HF folder of the reference, with the policy's architecture; unset: the initial model."""
    reference_offload: bool
    """Offload the reference's weights to host memory between its passes."""


class DistillationConfig(Section):
    """On-policy distillation from a teacher (teacher.model)."""

    coefficient: NonNegative
    """Coefficient of the KL to the teacher; 0: off. With algo.advantage=none it is the only training signal."""
    place: Literal["advantage", "loss"]
    """Subtract the KL from the advantage of each token, where it is subject to clipping, or add it to the token's loss
    with the estimator `ratio` (algo/kl.py). Without clipping and discount, both have the same gradient
    (algo/distill.py)."""
    discount: Share
    """With place=advantage: each token is credited with its own difference to the teacher and those of later tokens,
    discounted by this per token; 0: only with its own."""


class AlgoConfig(Section):
    """Advantage estimator, loss, off-policy corrections, KL and distillation."""

    advantage: Choice
    """Advantage estimator: a function in algo/advantage.py or, for turn-level ones, algo/credit.py, which cites its
    paper; or a function of yours, as module:name. none: rewards are ignored, as in pure distillation."""
    critic: CriticConfig
    shaping: ShapingConfig
    loss: Choice
    """Policy loss: a function in algo/loss.py, which cites its paper; or a function of yours, as module:name."""
    proximal: Literal["start", "log_linear", "behaviour"]
    """Proximal policy, which ratios are clipped against. start: the weights before the batch's first optimizer step
    (with a single step these are the current weights, and no extra pass is needed); log_linear: an interpolation
    between the engine's and the current log-probabilities by the age of the token; behaviour: the engine's
    probabilities, which replaces a correction."""
    correction: Choice | None
    """Importance weight that corrects the mismatch between engine and trainer: a function in algo/correction.py; unset:
    none."""
    mask: MaskConfig
    aggregation: Literal["token", "sequence", "constant"]
    """Loss aggregation: mean over tokens, over sequences, or over sequences of a constant length of
    `rollout.max_new_tokens`."""
    entropy_bonus: NonNegative
    """Coefficient of the policy's entropy in the loss."""
    kl: KLConfig
    distillation: DistillationConfig
    trust_region: Positive | None
    """Skip the remaining optimizer steps of a batch once the policy has moved this far from where they started,
    measured as the token mean of KL(start || policy); unset: no bound."""
    routing_replay: Literal["none", "R2", "R3"]
    """Routing replay: experts that a mixture-of-experts model's routers are forced to use in the policy's passes. R2:
    those that the trainer's routers chose before the batch's first optimizer step; R3: those that the engines chose for
    each token (docs/algorithms.md)."""
    replay_groups: Natural
    """Number of past groups that are trained again with each batch, subject to rollout.max_staleness; 0: none."""
    reset_every: Count | None
    """Interpolate the weights towards the initial ones, and reset the optimizer's moments, every this many batches
    (LoRR, arXiv 2508.06412: prevents overfitting at high replay ratios); unset: never."""
    reset_share: Share
    """Interpolation factor of that reset: 0 keeps the weights, 1 restores the initial ones."""
    mini_batches: Count
    """Optimizer steps per pass over a batch, each on its share of the groups."""
    epochs: Count
    """Number of passes over a batch."""

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps per batch."""
        return self.mini_batches * self.epochs

    @property
    def has_critic(self) -> bool:
        """Return whether a critic is trained."""
        return ADVANTAGES.traits(self.advantage).critic

    @property
    def measures_reference(self) -> bool:
        """Return whether the reference model is evaluated, for some batches at least."""
        return self.kl.coefficient > 0 or self.kl.measure_every > 0

    @field_validator("advantage")
    @classmethod
    def _advantage(cls, choice: Choice) -> Choice:
        return ADVANTAGES.completed(choice)

    @field_validator("loss")
    @classmethod
    def _loss(cls, choice: Choice) -> Choice:
        return LOSSES.completed(choice)

    @field_validator("correction")
    @classmethod
    def _correction(cls, choice: Choice | None) -> Choice | None:
        return CORRECTIONS.completed(choice) if choice else None

    @model_validator(mode="after")
    def _counts_nothing_twice(self) -> AlgoConfig:
        self.check_loss(LOSSES.traits(self.loss))
        if self.correction and self.proximal == "behaviour":
            remedy = "algo.proximal=behaviour already weights this gap: set algo.correction=null."
            raise ConfigError("algo.correction", self.correction.name, remedy)
        if self.kl.coefficient and self.kl.place == "loss" and self.kl.estimator == "k1":
            raise ConfigError(
                "algo.kl.estimator",
                "k1",
                "Its gradient is zero in expectation: use k2 or ratio, or algo.kl.place=reward.",
            )
        if self.kl.reference == "teacher" and self.kl.reference_path:
            remedy = "algo.kl.reference=teacher needs no weights: leave it unset."
            raise ConfigError("algo.kl.reference_path", self.kl.reference_path, remedy)
        if self.distillation.discount and self.distillation.place == "loss":
            raise ConfigError(
                "algo.distillation.discount",
                self.distillation.discount,
                "It applies to algo.distillation.place=advantage only: set 0.",
            )
        if self.advantage.name == "none" and not self.distillation.coefficient:
            raise ConfigError(
                "algo.advantage",
                "none",
                "Nothing would be learned: set algo.distillation.coefficient, or another estimator.",
            )
        if self.advantage.name == "none" and self.kl.coefficient and self.kl.place == "reward":
            raise ConfigError("algo.kl.place", "reward", "algo.advantage=none reads no rewards: set loss.")
        if self.routing_replay == "R2" and self.steps == 1:
            raise ConfigError(
                "algo.routing_replay",
                "R2",
                "With one optimizer step there is nothing to replay: raise mini_batches, or set none.",
            )
        return self

    def check_loss(self, traits: LossTraits) -> None:
        """Check that the other settings fit a loss. Raises ConfigError."""
        if self.correction and traits.corrects:
            remedy = f"algo.loss={self.loss.name} already weights this gap: set algo.correction=null."
            raise ConfigError("algo.correction", self.correction.name, remedy)
        if traits.per_sequence and self.aggregation != "sequence":
            remedy = f"algo.loss={self.loss.name} is a loss over sequences: set sequence."
            raise ConfigError("algo.aggregation", self.aggregation, remedy)

    @model_validator(mode="after")
    def _acts(self) -> AlgoConfig:
        """Check that every setting has an effect."""
        for name in ("sequence", "geometric"):
            bounds = getattr(self.mask, name)
            if bounds and bounds[0] > bounds[1]:
                raise ConfigError(f"algo.mask.{name}", bounds, "The interval is empty: give the lower bound first.")
            if bounds and self.proximal == "behaviour":
                remedy = "With algo.proximal=behaviour there is no gap to measure: set start, or leave it unset."
                raise ConfigError(f"algo.mask.{name}", bounds, remedy)
        correction = self.correction.settings if self.correction else {}
        if correction.get("floor", 0.0) > correction.get("cap", math.inf):
            remedy = f"Must not exceed algo.correction.cap ({correction['cap']})."
            raise ConfigError("algo.correction.floor", correction["floor"], remedy)
        advantage = self.advantage
        if ADVANTAGES.traits(advantage).unshaped:
            for name in ("overlong_buffer", "length_penalty", "normalize"):
                if value := getattr(self.shaping, name):
                    remedy = f"algo.advantage={advantage.name} needs the rewards as the task gave them: turn it off."
                    raise ConfigError(f"algo.shaping.{name}", value, remedy)
        return self
