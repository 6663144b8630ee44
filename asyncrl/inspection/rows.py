"""The contents of a recording as rows that can be filtered: one for each group, one for each batch."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import RecordError
from asyncrl.records.events import Committed, Rejected, Taken, unpacked
from asyncrl.records.reading import Recording
from asyncrl.schema import Group

READY = "ready"
"""Place of a group that no batch has taken yet."""


@dataclass
class GroupRow:
    """A finished group, ready, trained or rejected."""

    uid: str
    slot: int
    task: str
    place: str
    """The number of its batch, READY, or the reason why it was rejected."""
    rewards: list[float]
    lengths: list[int]
    """Tokens that the policy wrote, for each trajectory."""
    turns: int
    """Number of turns of its longest trajectory."""
    staleness: list[int]
    """Staleness of each trajectory in its batch; empty if it is in none."""
    truncated: int
    """Number of trajectories that the length limit cut off."""

    @property
    def reward(self) -> float:
        """Mean reward of its trajectories."""
        return sum(self.rewards) / max(1, len(self.rewards))


@dataclass
class StepRow:
    """A batch."""

    step: int
    groups: list[GroupRow]
    figures: dict[str, float]


@dataclass(frozen=True)
class GroupFilter:
    """A filter of groups. A bound of None does not apply. A group matches a range if one of its trajectories does."""

    uid: str | None = None
    """Prefix of the uid."""
    step: int | None = None
    reason: str | None = None
    task: str | None = None
    reward: tuple[float | None, float | None] = (None, None)
    length: tuple[float | None, float | None] = (None, None)
    staleness: tuple[float | None, float | None] = (None, None)

    def fits(self, row: GroupRow) -> bool:
        """Return whether a group matches the filter."""
        return (
            (self.uid is None or row.uid.startswith(self.uid))
            and (self.step is None or row.place == str(self.step))
            and (self.reason is None or row.place == self.reason)
            and (self.task is None or row.task == self.task)
            and _some(row.rewards, self.reward)
            and _some(row.lengths, self.length)
            and _some(row.staleness, self.staleness)
        )


def _some(values: list[float] | list[int], bounds: tuple[float | None, float | None]) -> bool:
    lowest, highest = bounds
    if lowest is None and highest is None:
        return True
    return any((lowest is None or v >= lowest) and (highest is None or v <= highest) for v in values)


def rows_of(recording: Recording) -> tuple[list[GroupRow], list[StepRow]]:
    """Return every group with content, in the order in which they ended, and every batch, ascending. Reads the
    recording once. Raises RecordError if it is damaged."""
    groups: dict[str, GroupRow] = {}
    oldest: dict[str, list[int]] = {}
    steps: dict[int, StepRow] = {}
    for event in recording.events():
        if isinstance(event, Committed | Rejected) and event.group:
            group = unpacked(event.group)
            groups[group.uid] = _row(group, event.reason if isinstance(event, Rejected) else READY)
            oldest[group.uid] = [trajectory.oldest_version for trajectory in group.trajectories]
        elif isinstance(event, Taken):
            if missing := [uid for uid in event.uids if uid not in groups]:
                raise RecordError(
                    f"{recording.folder}: batch {event.step} names groups that the recording lacks: {missing[:4]}"
                )
            taken = [groups[uid] for uid in event.uids]
            for row in taken:
                row.place = str(event.step)
                row.staleness = [event.step - version for version in oldest[row.uid]]
            steps[event.step] = StepRow(event.step, taken, event.figures)
    return list(groups.values()), [steps[step] for step in sorted(steps)]


def _row(group: Group, place: str) -> GroupRow:
    return GroupRow(
        group.uid,
        group.slot,
        group.task,
        place,
        [one.total for one in group.trajectories],
        [one.num_tokens for one in group.trajectories],
        max((len(one.turns) for one in group.trajectories), default=0),
        [],
        sum(one.turns[-1].completion.finish_reason == "length" for one in group.trajectories if one.turns),
    )
