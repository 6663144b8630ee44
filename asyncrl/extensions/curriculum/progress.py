"""The progress on each task, and what makes weights of it for the next prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from asyncrl import schema
from asyncrl.errors import ConfigError, RecordError
from asyncrl.extension import RolloutHooks
from asyncrl.schema import Group
from asyncrl.user_code import load

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import RolloutRun

FIELD = "curriculum.function"
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


def towards_half_solved(progress: CurriculumInput) -> Mapping[str, float]:
    """Return the configured weights times 4 p (1 - p), where p is the fraction of correct answers.

    Where all answers to a question agree there is little to learn (learnability: arXiv 2502.12272). The factor is at
    least 0.1, because a task that seems too hard or too easy may change, and 1 for a task without results.
    """

    def learnable(solved: float | None) -> float:
        return 1.0 if solved is None else max(0.1, 4 * solved * (1 - solved))

    return {name: task.weight * learnable(task.solved) for name, task in progress.tasks.items()}


@dataclass
class _History:
    """Results of one task's last WINDOW groups."""

    groups: int = 0
    rewards: list[float] = field(default_factory=list)  # mean of each group
    solved: list[float] = field(default_factory=list)  # fraction of each group
    tokens: list[float] = field(default_factory=list)  # mean length of each group's answers


class CurriculumMixture(RolloutHooks):
    """Weighs the tasks with a function of the progress on them."""

    def __init__(self, path: str) -> None:
        self._curriculum: Curriculum = load(path, FIELD)

    def start(self, run: RolloutRun) -> None:
        """Begin without any progress."""
        self._correct = {name: task.correct for name, task in run.tasks.items()}
        self._played = {name: _History() for name in run.config.mixture}
        self._progress: dict[str, TaskProgress] = {}  # of tasks of which no group was played since the last prompt

    def mixture(self, weights: Mapping[str, float], version: int) -> Mapping[str, float]:
        """Return the weights for the next prompt. Raises ConfigError if they are invalid."""
        told = CurriculumInput(version, {name: self._progress_of(name, weight) for name, weight in weights.items()})
        return _checked(self._curriculum(told), weights)

    def group(self, group: Group) -> None:
        """Record the rewards and lengths of a group that was played."""
        history, rewards = self._played[group.task], group.rewards
        history.groups += 1
        history.rewards = [*history.rewards, fmean(rewards)][-WINDOW:]
        solved = fmean([self._correct[group.task](reward) for reward in rewards])
        history.solved = [*history.solved, solved][-WINDOW:]
        history.tokens = [*history.tokens, fmean(group.lengths)][-WINDOW:]
        self._progress.pop(group.task, None)

    def state(self) -> bytes:
        """Return the results so far."""
        return schema.encode(self._played)

    def restore(self, state: bytes) -> None:
        """Go on with the results of a checkpoint; a new task starts without any."""
        try:
            played = msgspec.msgpack.decode(state, type=dict[str, _History])
        except (msgspec.DecodeError, ValueError) as error:
            raise RecordError(f"the checkpoint's state of the curriculum is damaged: {error}") from None
        self._played |= {name: history for name, history in played.items() if name in self._played}
        self._progress = {}

    def _progress_of(self, name: str, weight: float) -> TaskProgress:
        if (progress := self._progress.get(name)) is None or progress.weight != weight:
            history = self._played[name]
            recent = [fmean(of) if of else None for of in (history.rewards, history.solved, history.tokens)]
            progress = self._progress[name] = TaskProgress(weight, history.groups, *recent)
        return progress


def _checked(weights: Mapping[str, float], tasks: Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights of these tasks. Raises ConfigError."""
    if not isinstance(weights, Mapping):
        raise ConfigError(FIELD, weights, "Must return a mapping of task names to weights.")
    if unknown := sorted(weights.keys() - tasks.keys()):
        raise ConfigError(FIELD, unknown[0], f"There is no such task; choose among {sorted(tasks)}.")
    values = list(weights.values())
    positive = all(isinstance(weight, Real) and weight >= 0 for weight in values)
    if not positive or not 0 < sum(values) < math.inf:
        problem = "Weights must be finite and not negative, and at least one must be above 0."
        raise ConfigError(FIELD, dict(weights), problem)
    return weights
