"""Adapters of a frozen base (trainer.lora): their matrices, and the weights of the base that they change. Pure.

adapter of W [out, in]       A [r, in], B [out, r]
routed experts               one A for gate and up, whose B has the rows of both (extensions/lora/layers.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asyncrl.extensions.plan.tensors import Weight

ROWS = ("o_proj", "down_proj", "w2")
"""Projections whose inputs are shared by tensor-parallel ranks; of all others the outputs are."""
UPPER = ("up_proj", "w3")
"""Projections of routed experts that share the A of their gate."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines compute in one layer: SGLang's pool has room for the adapters of all of them."""


@dataclass(frozen=True)
class Adapters:
    """The settings of adapters that determine memory."""

    rank: int
    targets: tuple[str, ...] = ()  # names of projections; none: all
    base_bytes: float | None = None  # of an element of the weights below them (trainer.lora.base); None: as the others
    dropout: bool = False
    count: int = 1  # of sets of adapters that are trained (agents.roles)

    def on(self, *names: str) -> bool:
        """Return whether one of these projections has an adapter."""
        return not self.targets or any(name in self.targets for name in names)

    def adapts(self, weight: Weight) -> bool:
        """Return whether a weight has an adapter."""
        linear = weight.layer is not None and len(weight.shape) > 1 and not weight.whole
        return linear and not weight.name.endswith("_bias") and self.on(_projection(weight))

    def matrices(self, weights: Iterable[Weight], whole: Sequence[str] = ()) -> list[Weight]:
        """Return the matrices of the adapters. Tensor-parallel ranks share their first dimension, except
        those of the projections in `whole`, which every rank holds."""
        return [matrix for weight in weights if self.adapts(weight) for matrix in self._pair(weight, whole)]

    def _pair(self, weight: Weight, whole: Sequence[str]) -> Iterable[Weight]:
        *experts, out, inside = weight.shape
        if experts:  # a stack holds its matrices transposed
            out, inside = inside, out
        last, rows = _last(weight), _last(weight) in ROWS
        if not (weight.routed and last in UPPER):
            a = (inside, self.rank) if rows else (self.rank, inside)
            yield Weight(f"lora_A.{weight.name}", (*a, *experts), replicated=not rows)
        yield Weight(f"lora_B.{weight.name}", (out, self.rank, *experts), replicated=rows or last in whole)

    def split(self, weights: Sequence[Weight]) -> tuple[list[Weight], list[Weight]]:
        """Return the weights of the base that stay as they are, and those in another format."""
        packed = [self.base_bytes is not None and self.adapts(weight) for weight in weights]
        plain = [weight for weight, one in zip(weights, packed, strict=True) if not one]
        return plain, [weight for weight, one in zip(weights, packed, strict=True) if one]

    @property
    def served(self) -> Adapters:
        """Return the adapters for which an engine has room."""
        more = {name for layer in FUSED if self.on(*layer) for name in layer}
        return replace(self, targets=tuple(sorted({*self.targets} | more)) if self.targets else ())


def _last(weight: Weight) -> str:
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def _projection(weight: Weight) -> str:
    """Return the name of a projection as in trainer.lora.targets."""
    last = _last(weight)
    if not weight.routed:
        return last
    return "down_proj" if last in ROWS else "gate_up_proj"
