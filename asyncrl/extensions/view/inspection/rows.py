"""The contents of a recording as rows that can be filtered: one for each group, one for each batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from asyncrl.errors import RecordError
from asyncrl.extensions.recording.events import (
    Committed,
    Event,
    PackedGroup,
    PackedTurn,
    Rejected,
    num_tokens,
    token_rewards,
)
from asyncrl.extensions.recording.reader import Recording
from asyncrl.rollout.events import Taken
from asyncrl.schema import Completion, Trajectory, Turn

Bounds = tuple[float | None, float | None]
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
    question: str = ""
    """Hash of its prompt: equal for the same question in another step."""

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
    reward: Bounds = (None, None)
    length: Bounds = (None, None)
    staleness: Bounds = (None, None)
    question: str | None = None

    def fits(self, row: GroupRow) -> bool:
        """Return whether a group matches the filter."""
        return (
            (self.uid is None or row.uid.startswith(self.uid))
            and (self.step is None or row.place == str(self.step))
            and (self.reason is None or row.place == self.reason)
            and (self.task is None or row.task == self.task)
            and (self.question is None or row.question == self.question)
            and _some(row.rewards, self.reward)
            and _some(row.lengths, self.length)
            and _some(row.staleness, self.staleness)
        )


def bounds(text: str) -> Bounds:
    """Parse A:B, A: or :B, or one number. Raises RecordError."""
    low, colon, high = text.partition(":")
    try:
        found = (float(low) if low else None, float(high) if high else None)
    except ValueError:
        raise RecordError(f"{text!r:.80} is not a range: write 0.5:1, 0.5: or :1") from None
    return found if colon else (found[0], found[0])


def within(value: float, wanted: Bounds) -> bool:
    """Return whether a value is in a range."""
    lowest, highest = wanted
    return (lowest is None or value >= lowest) and (highest is None or value <= highest)


def _some(values: list[float] | list[int], wanted: Bounds) -> bool:
    return wanted == (None, None) or any(within(value, wanted) for value in values)


class RecordedRows:
    """The rows of a recording, from its events in any order. Events that are added again change nothing."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupRow] = {}
        """Every group with content by its uid."""
        self.batches: dict[int, Taken] = {}
        self._oldest: dict[str, list[int]] = {}
        self._taken: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, Committed | Rejected) and event.group:
            row = _row(event.group, event.reason if isinstance(event, Rejected) else READY)
            self.groups[row.uid] = row
            spans = [[span for turn in turns for span in turn.versions] for turns, _ in event.group.trajectories]
            self._oldest[row.uid] = [min((span.version for span in own), default=0) for own in spans]
            self._place(row.uid)
        elif isinstance(event, Taken):
            self.batches[event.step] = event
            for uid in event.uids:
                self._taken[uid] = event.step
                self._place(uid)

    def _place(self, uid: str) -> None:
        """Note the batch of a group, as soon as both are known."""
        if uid in self._taken and uid in self.groups:
            row, step = self.groups[uid], self._taken[uid]
            row.place = str(step)
            row.staleness = [step - version for version in self._oldest[uid]]


def rows_of(recording: Recording) -> tuple[list[GroupRow], list[StepRow]]:
    """Return every group with content, in the order in which they ended, and every batch, ascending. Reads the
    recording once. Raises RecordError if it is damaged."""
    rows = RecordedRows()
    for event in recording.events():
        rows.add(event)
    steps = []
    for step, taken in sorted(rows.batches.items()):
        if missing := [uid for uid in taken.uids if uid not in rows.groups]:
            raise RecordError(f"{recording.folder}: batch {step} names groups that the recording lacks: {missing[:4]}")
        steps.append(StepRow(step, [rows.groups[uid] for uid in taken.uids], taken.figures))
    return list(rows.groups.values()), steps


def _row(group: PackedGroup, place: str) -> GroupRow:
    """Build the row without unpacking tokens, of which a recording may hold gigabytes."""
    trajectories = [Trajectory([_outline(turn) for turn in turns], reward) for turns, reward in group.trajectories]
    turns = [turns for turns, _ in group.trajectories]
    return GroupRow(
        group.uid,
        group.slot,
        group.task,
        place,
        [one.total for one in trajectories],
        [sum(num_tokens(turn) for turn in own) for own in turns],
        max(map(len, turns), default=0),
        [],
        sum(own[-1].finish_reason == "length" for own in turns if own),
        hashlib.sha256(group.prompt_ids + "".join(group.prompt_images).encode()).hexdigest()[:12],
    )


def _outline(turn: PackedTurn) -> Turn:
    """Return the turn without tokens, with all of its reward."""
    reward = turn.reward + sum(token_rewards(turn))
    return Turn([], Completion([], [], [], turn.finish_reason), reward, begins=turn.begins, fork=turn.fork)
