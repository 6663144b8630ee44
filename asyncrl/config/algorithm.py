"""Configuration of the algorithm: advantages, loss, corrections and KL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator, model_validator

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES, LossTraits
from asyncrl.settings import Bounds, Choice, Count, Natural, NonNegative, Positive, Rule, Section, require


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

    @property
    def changes_rewards(self) -> bool:
        """Return whether rewards are shaped at all."""
        return bool(self.overlong_buffer or self.length_penalty or self.clip or self.normalize)


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
    reference: str
    """Reference model. weights: frozen weights in the trainer; teacher: the teacher's engines, which score every
    episode anyway, so that the trainer needs no second copy of the weights and no second forward pass (with the
    extension that asks them)."""
    reference_path: str | None
    """With reference=weights: HF folder of the reference, with the policy's architecture; unset: the initial model.
    With trainer.lora.rank, unset: the base, without a second copy of it, even if trainer.lora.path has other adapters
    to start from."""
    reference_offload: bool
    """Offload the reference's weights to host memory between its passes."""


class AlgoConfig(Section):
    """Advantage estimator, loss, off-policy corrections and KL."""

    advantage: Choice
    """Advantage estimator: a function in algo/advantage.py, which cites its paper, or of an extension; or a function
    of yours, as module:name. none: rewards are ignored, as in pure distillation."""
    shaping: ShapingConfig
    loss: Choice
    """Policy loss: a function in algo/loss.py, which cites its paper, or of an extension; or a function of yours, as
    module:name."""
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
    trust_region: Positive | None
    """Skip the remaining optimizer steps of a batch once the policy has moved this far from where they started,
    measured as the token mean of KL(start || policy); unset: no bound."""
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
        """Return whether the estimator needs the values of a critic."""
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
    def _settings_agree(self) -> AlgoConfig:
        self.check_loss(LOSSES.traits(self.loss))
        require(self, self._rules(), prefix="algo.")
        return self

    def check_loss(self, traits: LossTraits) -> None:
        """Check that the other settings fit a loss. Raises ConfigError."""
        twice = f"algo.loss={self.loss.name} already weights this gap: set algo.correction=null."
        other = f"algo.loss={self.loss.name} is a loss over sequences: set sequence."
        rules: list[Rule] = [
            ("correction", self.correction is not None and traits.corrects, twice),
            ("aggregation", traits.per_sequence and self.aggregation != "sequence", other),
        ]
        require(self, rules, prefix="algo.")

    def _rules(self) -> Iterator[Rule]:
        """Yield the rules of settings that would count something twice, or have no effect."""
        advantage, kl, behaviour = self.advantage, self.kl, self.proximal == "behaviour"
        why = "algo.proximal=behaviour already weights this gap: set algo.correction=null."
        yield "correction", self.correction is not None and behaviour, why
        why = "Its gradient is zero in expectation: use k2 or ratio, or algo.kl.place=reward."
        yield "kl.estimator", kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1", why
        why = f"algo.kl.reference={kl.reference} needs no weights: leave it unset."
        yield "kl.reference_path", kl.reference != "weights" and bool(kl.reference_path), why
        why = "algo.advantage=none reads no rewards: set loss."
        yield "kl.place", advantage.name == "none" and kl.coefficient > 0 and kl.place == "reward", why
        for name in ("sequence", "geometric"):
            bounds = getattr(self.mask, name)
            why = "The interval is empty: give the lower bound first."
            yield f"mask.{name}", bool(bounds) and bounds[0] > bounds[1], why
            why = "With algo.proximal=behaviour there is no gap to measure: set start, or leave it unset."
            yield f"mask.{name}", bool(bounds) and behaviour, why
        weight = self.correction.settings if self.correction else {}
        floor, cap = weight.get("floor", 0.0), weight.get("cap", math.inf)
        yield "correction.floor", floor, floor > cap, f"Must not exceed algo.correction.cap ({cap})."
        why = f"algo.advantage={advantage.name} needs the rewards as the task gave them: turn it off."
        for name in ("overlong_buffer", "length_penalty", "normalize"):
            shaped = bool(getattr(self.shaping, name)) and ADVANTAGES.traits(advantage).unshaped
            yield f"shaping.{name}", shaped, why
