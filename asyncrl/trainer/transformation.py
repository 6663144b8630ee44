"""What a network trains: all weights of a model folder, or what an extension adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.parallel import Parallel
from asyncrl.schema import POLICY
from asyncrl.trainer.microbatches import Groups
from asyncrl.weights.export import save_hf
from asyncrl.weights.reshard import Resharder

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Transformation:
    """What a network trains in place of a model folder's weights, one object for each network: this one trains them
    all. An extension may have another (Extension.transformation), also several models on the same frozen weights."""

    frozen = False
    """Whether the folder's weights stay as they are, below what is added. Their linear layers are then modules of their
    own, whose output can be added to: no norm is fused with them, and no expert with another."""
    random = False
    """Whether passes with gradient draw random numbers."""

    def apply(self, chunks: Sequence[GPTModel], weights: Resharder) -> None:
        """Change the chunks, which hold the folder's weights, before data parallelism wraps them. A layer whose weight
        is exported as something else gets a method `exported`, which takes the name of a model and returns the tensor
        (None: the folder's); one whose weight has another format keeps that in a module `packed`."""

    def model_of(self, role: str) -> str:
        """Return the name of the model that a role's samples train. Raises ConfigError."""
        return POLICY

    def divided(self, groups: Groups) -> list[tuple[str, Groups]]:
        """Return the samples that each model computes, by its name."""
        return [(POLICY, groups)]

    def use(self, model: str | None, *, gradient: bool) -> None:
        """Compute the next passes with this model; None: with the folder's weights alone."""

    def of_another(self) -> Transformation:
        """Return that of another network, which is trained beside this one and has one model."""
        return Transformation()

    def keep(self, run_dir: Path, origin: Path | None, weights: Resharder, parallel: Parallel) -> None:
        """Store in the run folder what checkpoints do not hold. Runs on every rank. `origin` is the folder of the run
        whose checkpoint is resumed. Raises RecordError if that run had something else."""

    def save(self, target: Path, base: Path, weights: Resharder, parallel: Parallel, dtype: str) -> None:
        """Export what is trained of the model folder `base`; runs on every rank. Raises WeightsError if the disk cannot
        take it."""
        save_hf(target, base, weights, parallel, dtype)
