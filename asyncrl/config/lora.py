"""Configuration of the adapters of parameter-efficient training (LoRA, arXiv 2106.09685), and of the engines that serve
them (weights.lora=versions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Positive, Section, Share

if TYPE_CHECKING:
    from asyncrl.config import Config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a dense model, by their names in HF, in PEFT and in SGLang."""


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of a frozen base model, in PEFT's form: queries, keys, values, gate and up
    have an adapter each. Docs: docs/lora.md."""

    rank: Count | None
    """Rank of every adapter; unset: all weights are trained, without adapters."""
    alpha: Positive
    """Adapters are scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora`."""
    targets: Literal["all"] | list[str]
    """Names of the projections that get an adapter, such as [q_proj, v_proj]; all: every linear layer except the
    output layer and the routers of experts."""
    dropout: Share
    """Dropout of the adapters' input while gradients are computed."""
    rslora: bool
    """Scale by alpha / sqrt(rank) (rank-stabilized LoRA, arXiv 2312.03732)."""
    init: Literal["default", "gaussian"]
    """Start of A, as PEFT's init_lora_weights: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank. B
    starts at zero."""
    path: str | None
    """PEFT folder from which the adapters start; unset: from `init`."""
    save_merged: bool
    """Beside each exported PEFT folder, also write the model with the adapters in its weights: hf-merged/."""
    base: str
    """Format of the frozen base in the trainers, of an extension; none: that of trainer.dtype. The engines serve the
    same weights, in engine.dtype."""

    @model_validator(mode="after")
    def _base_is_frozen(self) -> LoraConfig:
        if self.base != "none" and self.rank is None:
            raise ConfigError("trainer.lora.base", self.base, "Weights that are trained stay as they are: set a rank.")
        return self

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' output."""
        assert self.rank is not None, "trainer.lora.rank is unset"
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def adapter_targets(lora: LoraConfig) -> list[str]:
    """Return the projections that have an adapter."""
    return list(LINEARS) if lora.targets == "all" else list(lora.targets)


def resident_adapters(config: Config) -> int:
    """Return the maximum number of adapters in an engine.

    Running groups were admitted at most max_staleness versions ago (rollout/buffer.py), so they use max_staleness + 1
    versions; the next one is loaded beside them, and an evaluation keeps the one that it began with. Past versions that
    play roles are as many as these groups can have drawn beside the versions above.
    """
    evaluated = bool(config.eval_sets)
    past = sum(past.keep + evaluated for past in config.agents.past.values())
    return (config.rollout.max_staleness + 2 + evaluated) * len(config.agents.adapters) + past


def engine_slots(config: Config) -> int:
    """Return the number of adapters that an engine has memory for. The base counts as one."""
    return resident_adapters(config) + 1
