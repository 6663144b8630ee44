"""User hooks and their built-in choices: functions that accept and select groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.schema import Group

Accept = Callable[[Group], bool | str]
"""Returns whether a group may be trained, or the reason why not."""
Select = Callable[[Sequence[Group], int], Sequence[Group]]
"""Returns `count` of the ready groups that are not yet due, to fill up a batch."""


def accept_all(group: Group) -> bool:
    """Accept every group."""
    return True


def has_signal(group: Group) -> bool | str:
    """Reject groups whose rewards are all equal: they have no advantage (DAPO's dynamic sampling, arXiv 2503.14476,
    section 3.2)."""
    return group.has_signal or "no_signal"


def ends(group: Group) -> bool | str:
    """Reject groups whose answers were all cut off by the length limit (DAPO's overlong filtering, section 3.4)."""
    finished = any(t.turns[-1].completion.finish_reason == "stop" for t in group.trajectories)
    return finished or "truncated"


def lowest_first(ready: Sequence[Group], count: int) -> Sequence[Group]:
    """Select groups in the order of admission."""
    return ready[:count]
