"""A batch that is trained in parts, each as soon as its groups are ready (trainer.batch_parts), with one optimizer step
from the sum of their gradients.

The loss divides by what the whole batch counts (algo/samples.py, denominator), which is known with the last part only.
The parts before it divide by an estimate: as many parts like the first. Their gradient is then multiplied by the
estimate over the true count, before that of the last part is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.algo.diagnostics import step_figures
from asyncrl.algo.samples import denominator
from asyncrl.algo.table import TrainingTable
from asyncrl.parallel import Parallel
from asyncrl.trainer.microbatches import Groups, TokenAccumulator

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy

NUMBERS = ("context", "state")
"""Columns of tokens that number something within the table."""


class BatchParts:
    """The parts of a batch that were trained so far. Their gradient is in the network's buffers."""

    def __init__(self, parts: int, aggregation: str, parallel: Parallel) -> None:
        """Prepare for a batch of about `parts` parts."""
        self._parts = parts
        self._aggregation = aggregation
        self._parallel = parallel
        self._begin()

    def _begin(self) -> None:
        self._tables = list[TrainingTable]()
        self._seen = list[TokenAccumulator]()
        self._counts: list[int] = []
        self._trained = 0  # groups that have a gradient

    @property
    def begun(self) -> bool:
        """Return whether a part was added."""
        return bool(self._tables)

    def _add(self, table: TrainingTable, *, last: bool) -> tuple[TrainingTable, TokenAccumulator]:
        """Add a part whose weights are those of a step over it alone. Return it with the weights to train it with, and
        the accumulator of its results."""
        self._counts.append(denominator(table, self._aggregation))
        whole = max(1, sum(self._counts)) if last else self._estimate
        self._tables.append(replace(table, weights=table.weights * (self._counts[-1] / whole)))
        self._seen.append(TokenAccumulator(table.num_tokens, self._parallel))
        return self._tables[-1], self._seen[-1]

    @property
    def _correction(self) -> float:
        """Return the factor by which the gradient of the parts before the last must be multiplied."""
        return self._estimate / max(1, sum(self._counts))

    def _whole(self) -> tuple[TrainingTable, TokenAccumulator]:
        """Return the table of the whole batch, and its results."""
        factors = [self._correction] * (len(self._tables) - 1) + [1.0]
        scaled = [replace(one, weights=one.weights * by) for one, by in zip(self._tables, factors, strict=True)]
        return joined(scaled), TokenAccumulator.joined(self._seen, factors)

    def train(self, policy: Policy, groups: Groups, table: TrainingTable, *, last: bool) -> dict[str, float]:
        """Add the gradient of a part. Take the optimizer step after the last one, and return the statistics of the
        whole batch; the next part is then the first of another."""
        objective, lr = policy.objective, policy.optimizer.lr
        table, seen = self._add(replace(table, weights=objective.shares(groups, table)), last=last)
        chosen = objective.with_gradient(groups, table)
        if last and self._trained:
            policy.network.scale_gradient(self._correction)
        if chosen or (last and self._trained):  # without groups, the last part still reduces the gradient of the others
            policy.accumulate(chosen, table, seen, first=not self._trained, last=last)
        self._trained += len(chosen)
        if not last:
            return {}
        norm, applied = policy.optimizer.step() if self._trained else (0.0, True)
        policy.network.gather()
        norms = [0.0, norm] if self._trained else [0.0]
        figures = {**step_figures(norms, int(not applied), lr, self._trained), **objective.figures(*self._whole())}
        self._begin()
        return figures

    @property
    def _estimate(self) -> int:
        return max(1, self._counts[0]) * self._parts


def joined(tables: Sequence[TrainingTable]) -> TrainingTable:
    """Return one table with the rows of all of these, in order."""
    shifts, parts = Counter[str](), list[TrainingTable]()
    for table in tables:
        sizes = Counter(sample=table.num_samples, episode=table.num_episodes, group=table.num_groups)
        sizes += Counter({name: int(getattr(table, name).max()) + 1 for name in NUMBERS if table.num_tokens})
        parts.append(replace(table, **{name: getattr(table, name) + shifts[name] for name in (*sizes, *NUMBERS)}))
        shifts += sizes
    columns: dict[str, Any] = {}
    for name in parts[0].columns():
        found = [column for part in parts if (column := part.columns()[name]) is not None]
        columns[name] = torch.cat(found) if len(found) == len(parts) else None
    return TrainingTable(**columns)
