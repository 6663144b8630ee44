"""What users may put in the place of ours: agents, and the functions that mix tasks, accept and select groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncrl.rollout.curriculum import Progress
from asyncrl.types import Group

Accept = Callable[[Group], bool | str]
"""Whether a group may be trained, or the reason why not."""
Select = Callable[[Sequence[Group], int], Sequence[Group]]
"""Which of the ready groups that need not go yet fill up a batch, and how many are wanted."""


def by_weight(progress: Progress) -> Mapping[str, float]:
    """The configured weights."""
    return {name: task.weight for name, task in progress.tasks.items()}


def towards_half_solved(progress: Progress) -> Mapping[str, float]:
    """The configured weights times 4 p (1 - p), p being the share of right answers: where the answers to a question
    agree there is little to learn (learnability: arXiv 2502.12272). A tenth is left to what seems too hard or too easy,
    for that changes; a task of which nothing is known counts as half solved."""

    def learnable(solved: float | None) -> float:
        return 1.0 if solved is None else max(0.1, 4 * solved * (1 - solved))

    return {name: task.weight * learnable(task.solved) for name, task in progress.tasks.items()}


def accept_all(group: Group) -> bool:
    """Whatever was played is trained."""
    return True


def has_signal(group: Group) -> bool | str:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): where all rewards are equal no advantage is left."""
    return group.has_signal or "no_signal"


def ends(group: Group) -> bool | str:
    """Over-long filtering (DAPO, section 3.4): not a group whose answers were all cut off by the length limit."""
    finished = any(t.turns[-1].completion.finish_reason == "stop" for t in group.trajectories)
    return finished or "truncated"


def lowest_first(ready: Sequence[Group], count: int) -> Sequence[Group]:
    """In the order of admission."""
    return ready[:count]


def freshest_first(ready: Sequence[Group], count: int) -> Sequence[Group]:
    """Those whose oldest token is youngest."""
    return sorted(ready, key=lambda group: -min(t.oldest_version for t in group.trajectories))[:count]
