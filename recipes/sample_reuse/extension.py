"""Groups that are trained again, and weights that are pulled back to the initial ones.

A group that was trained as batch v may be trained again with batch w as long as every token of it was written by
version w - rollout.max_staleness or later: the bound holds for every trained token, also the second time. Groups are
drawn at random from a seed, equally on every rank.

A reset is weights <- (1 - share) * weights + share * start, with new moments of the optimizer (LoRR, arXiv 2508.06412;
shrink and perturb, arXiv 1910.08475). Each rank keeps its initial weights in host memory, in their own precision.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, TrainerHooks
from asyncrl.schema import Batch, Group
from asyncrl.settings import Count, Natural, Section, Share


class SampleReuseSettings(Section):
    """Settings of the recipe."""

    groups: Natural = 0
    """Number of past groups that are trained again with each batch."""
    reset_every: Count | None = None
    """Number of batches between resets; unset: none."""
    reset_share: Share = 0.2
    """How far a reset goes: 0 keeps the weights, 1 restores the initial ones."""


class Past:
    """The groups that may be trained again, as a checkpoint keeps them."""

    def __init__(self, count: int, max_staleness: int, seed: int) -> None:
        """Draw `count` groups for each batch."""
        self._count = count
        self._max_staleness = max_staleness
        self._seed = seed
        self.kept: list[Group] = []

    def draw(self, version: int) -> list[Group]:
        """Draw groups for batch `version`. Call it before `keep` for that batch."""
        self.kept = [group for group in self.kept if max(group.staleness(version)) <= self._max_staleness]
        chance = random.Random(f"{self._seed} {version}")
        return chance.sample(self.kept, min(self._count, len(self.kept)))

    def keep(self, groups: Sequence[Group]) -> None:
        """Keep the groups that have a signal (their rewards differ) and in which every trajectory has tokens."""
        if self._count:
            self.kept += [
                group
                for group in groups
                if group.has_signal and all(trajectory.num_tokens for trajectory in group.trajectories)
            ]


class SampleReuseHooks(TrainerHooks):
    """The recipe on one trainer rank."""

    def __init__(self, settings: SampleReuseSettings, policy: Any) -> None:
        """Keep the weights that training starts from, if there will be resets."""
        config = policy.config
        self._settings = settings
        self._optimizer = policy.optimizer
        self._past = Past(settings.groups, config.rollout.max_staleness, config.run.seed)
        self._reused = 0
        parameters = policy.network.parameters() if settings.reset_every else ()
        self._trained: list[Tensor] = [one for one in parameters if one.requires_grad]
        self._start = [one.detach().to("cpu", copy=True) for one in self._trained]

    def before_update(self, batch: Batch) -> list[Group]:
        """Draw from the past, and keep the batch."""
        drawn = self._past.draw(batch.version)
        self._past.keep(batch.groups)
        self._reused = len(drawn)
        return drawn

    @torch.no_grad()
    def after_update(self, version: int) -> dict[str, float]:
        """Reset the weights if this version calls for it."""
        if self._settings.reset_every and version % self._settings.reset_every == 0:
            for parameter, start in zip(self._trained, self._start, strict=True):
                parameter.lerp_(start.to(parameter.device), self._settings.reset_share)
            self._optimizer.start_anew()
        return {"sample_reuse/groups": float(self._reused)}

    def state(self) -> bytes:
        """Return the groups that may be trained again."""
        return msgspec.msgpack.encode(self._past.kept)

    def restore(self, state: bytes) -> None:
        """Take the groups of a checkpoint."""
        self._past.kept = msgspec.msgpack.decode(state, type=list[Group])


class SampleReuse(Extension):
    """Train past groups again; reset the weights from time to time."""

    Settings = SampleReuseSettings

    def check(self, config: Any) -> Iterator[ConfigError]:
        """Groups are added to a whole batch."""
        if self.settings.groups and config.trainer.batch_parts > 1:
            remedy = "They are added to a whole batch: set 0, or trainer.batch_parts=1."
            yield ConfigError("sample_reuse.groups", self.settings.groups, remedy)

    def trainer(self, policy: Any) -> TrainerHooks:
        """Return the hooks of a rank."""
        return SampleReuseHooks(self.settings, policy)
