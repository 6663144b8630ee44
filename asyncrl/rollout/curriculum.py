"""The task mixture: each prompt's task is drawn with weights that the curriculum function returns for that prompt.

Prompt n is a function of the seed and of all weights so far. While these do not depend on how groups went (by_weight),
the sequence of prompts does not depend on when groups ended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean

from asyncrl.errors import ConfigError
from asyncrl.schema import Group, Prompt
from asyncrl.tasks import Task

WINDOW = 64
"""Number of recent groups over which a task's figures are averaged."""


@dataclass(frozen=True)
class TaskProgress:
    """Progress on one task. Groups count once they were played, whether they are trained or not."""

    weight: float  # as configured
    groups: int  # played so far
    reward: float | None  # mean of the last WINDOW groups; None before the first
    solved: float | None  # fraction of correct answers in them
    tokens: float | None  # mean length of their answers


@dataclass(frozen=True)
class CurriculumInput:
    """Input of a curriculum function."""

    version: int  # served by the engines
    tasks: Mapping[str, TaskProgress]  # by name


Curriculum = Callable[[CurriculumInput], Mapping[str, float]]
"""Returns the weights of the tasks, by name, for the next prompt; a task that is not named has weight 0."""


@dataclass
class _History:
    """Results of one task's last WINDOW groups."""

    groups: int = 0
    rewards: list[float] = field(default_factory=list)  # mean of each group
    solved: list[float] = field(default_factory=list)  # fraction of each group
    tokens: list[float] = field(default_factory=list)  # mean length of each group's answers


@dataclass
class MixerState:
    """State of the mixer, for a checkpoint."""

    played: dict[str, _History]
    chance: tuple[int, tuple[int, ...], float | None]  # random.Random.getstate()


class Mixer:
    """Mixes the training prompts of all tasks into one stream."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        streams: Mapping[str, Iterator[Prompt]],
        weights: Mapping[str, float],
        curriculum: Curriculum,
        seed: int,
    ) -> None:
        """`streams` and the configured `weights` are keyed by task; `tasks` may hold more tasks."""
        self._tasks = tasks
        self._streams = streams
        self._weights = weights
        self._curriculum = curriculum
        self._played = {name: _History() for name in streams}
        self._draws = random.Random(f"{seed} mixture")
        self._progress: dict[str, TaskProgress] = {}  # of tasks of which no group was played since the last draw

    def draw(self, version: int) -> Prompt:
        """Return the next prompt, while the engines serve `version`. Raises ConfigError if weights are invalid."""
        weights = self._curriculum(CurriculumInput(version, {name: self._progress_of(name) for name in self._streams}))
        (name,) = self._draws.choices(list(self._streams), self._checked(weights))
        return next(self._streams[name])

    def record(self, group: Group) -> None:
        """Record the rewards and lengths of a group that was played."""
        history, rewards = self._played[group.task], group.rewards
        history.groups += 1
        history.rewards = [*history.rewards, fmean(rewards)][-WINDOW:]
        solved = fmean([self._tasks[group.task].correct(reward) for reward in rewards])
        history.solved = [*history.solved, solved][-WINDOW:]
        history.tokens = [*history.tokens, fmean(group.lengths)][-WINDOW:]
        self._progress.pop(group.task, None)

    def state(self) -> MixerState:
        """Return the state. Serialize it immediately: it shares its parts with the mixer."""
        return MixerState(self._played, self._draws.getstate())  # type: ignore[arg-type]

    def restore(self, state: MixerState) -> None:
        """Restore a saved state; a new task starts without history."""
        for name, history in state.played.items():
            if name in self._played:
                self._played[name] = history
        self._draws.setstate(state.chance)
        self._progress = {}

    def _progress_of(self, name: str) -> TaskProgress:
        if (progress := self._progress.get(name)) is None:
            history = self._played[name]
            recent = [fmean(of) if of else None for of in (history.rewards, history.solved, history.tokens)]
            progress = self._progress[name] = TaskProgress(self._weights[name], history.groups, *recent)
        return progress

    def _checked(self, weights: Mapping[str, float]) -> list[float]:
        """Return one weight per task, in the order of the configuration. Raises ConfigError."""
        if not isinstance(weights, Mapping):
            raise ConfigError("rollout.curriculum", weights, "Must return a mapping of task names to weights.")
        if unknown := sorted(weights.keys() - self._streams.keys()):
            raise ConfigError(
                "rollout.curriculum", unknown[0], f"There is no such task; choose among {sorted(self._streams)}."
            )
        in_order = [weights.get(name, 0.0) for name in self._streams]
        positive = all(isinstance(weight, Real) and weight >= 0 for weight in in_order)
        if not positive or not 0 < sum(in_order) < math.inf:
            raise ConfigError(
                "rollout.curriculum",
                dict(weights),
                "Weights must be finite and not negative, and at least one must be above 0.",
            )
        return in_order
