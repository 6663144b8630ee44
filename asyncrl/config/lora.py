"""Configuration of the adapters of parameter-efficient training (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Positive, Section, Share


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
