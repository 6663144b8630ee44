"""Which task the next prompt comes from: drawn by weights that a function gives, at every prompt.

Prompt n is a function of the seed and of the weights so far: while these do not depend on how groups went (by_weight),
the sequence of prompts does not depend on when they ended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean

from asyncrl.errors import ConfigError
from asyncrl.tasks import Task
from asyncrl.types import Group, Prompt

WINDOW = 64
"""Groups of a task that its recent figures are of."""


@dataclass(frozen=True)
class TaskProgress:
    """How one task goes. Groups count once they were played, whether they are trained or not."""

    weight: float  # as configured
    groups: int  # played so far
    reward: float | None  # mean of the last WINDOW groups; None before the first
    solved: float | None  # share of right answers in them


@dataclass(frozen=True)
class Progress:
    """What a curriculum decides from."""

    version: int  # that the engines serve
    tasks: Mapping[str, TaskProgress]  # by name


Curriculum = Callable[[Progress], Mapping[str, float]]
"""The weights of the tasks, by name, for the next prompt; what is not named has none."""


@dataclass
class _History:
    """What was played of one task: the last WINDOW groups."""

    groups: int = 0
    rewards: list[float] = field(default_factory=list)  # means of groups
    solved: list[float] = field(default_factory=list)  # shares of groups


@dataclass
class MixerState:
    """What the next draw depends on."""

    played: dict[str, _History]
    chance: tuple[int, tuple[int, ...], float | None]  # random.Random.getstate()


class Mixer:
    """The training prompts of all tasks as one stream."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        streams: Mapping[str, Iterator[Prompt]],
        weights: Mapping[str, float],
        curriculum: Curriculum,
        seed: int,
    ) -> None:
        """`streams` and configured `weights` are by task; `tasks` may hold more."""
        self._tasks, self._streams, self._weights, self._curriculum = tasks, streams, weights, curriculum
        self._played = {name: _History() for name in streams}
        self._draws = random.Random(f"{seed} mixture")

    def draw(self, version: int) -> Prompt:
        """The next prompt, admitted while the engines serve `version`. Raises ConfigError for impossible weights."""
        found = self._curriculum(Progress(version, {name: self._progress(name) for name in self._streams}))
        (name,) = self._draws.choices(list(self._streams), self._checked(found))
        return next(self._streams[name])

    def record(self, group: Group) -> None:
        """A group was played."""
        history, rewards = self._played[group.task], [trajectory.total for trajectory in group.trajectories]
        history.groups += 1
        history.rewards = [*history.rewards, fmean(rewards)][-WINDOW:]
        solved = fmean(self._tasks[group.task].correct(reward) for reward in rewards)
        history.solved = [*history.solved, solved][-WINDOW:]

    def state(self) -> MixerState:
        """To be written down at once: its parts are the mixer's own."""
        return MixerState(self._played, self._draws.getstate())  # type: ignore[arg-type]

    def restore(self, state: MixerState) -> None:
        """As it was; a task that is new has no history."""
        for name, history in state.played.items():
            if name in self._played:
                self._played[name] = history
        self._draws.setstate(state.chance)

    def _progress(self, name: str) -> TaskProgress:
        history = self._played[name]
        recent = (fmean(history.rewards), fmean(history.solved)) if history.groups else (None, None)
        return TaskProgress(self._weights[name], history.groups, *recent)

    def _checked(self, weights: Mapping[str, float]) -> list[float]:
        """One for each task, in the order of the configuration."""
        if not isinstance(weights, Mapping):
            raise ConfigError("rollout.curriculum", weights, "Must return a mapping of task names to weights.")
        if unknown := sorted(weights.keys() - self._streams.keys()):
            raise ConfigError("rollout.curriculum", unknown[0], f"No such task: it may name {sorted(self._streams)}.")
        in_order = [weights.get(name, 0.0) for name in self._streams]
        positive = all(isinstance(weight, Real) and weight >= 0 for weight in in_order)
        if not positive or not 0 < sum(in_order) < math.inf:
            raise ConfigError(
                "rollout.curriculum", dict(weights), "Weights are finite numbers, not negative, not all zero."
            )
        return in_order
