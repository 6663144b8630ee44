"""The reward interface: what a reward receives and returns, from a word counter to a fleet of judges.

A fault of the scoring machinery (a judge, a reward model, a sandbox, the record of a task) raises EpisodeFailed with
the reason `judge`, `reward_model`, `sandbox` or `reward_error`: the episode is counted and replaced. A reward of 0 is a
statement about the answer, never about the machinery.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.errors import EpisodeFailed
from asyncrl.schema import Trajectory, number


@dataclass(frozen=True)
class RewardInput:
    """Input of a reward: one episode."""

    text: str  # the last completion, without special tokens
    texts: Sequence[str]  # every completion in order, one per turn
    question: Mapping[str, Any]  # the task's record, with `messages`
    trajectory: Trajectory

    @property
    def record(self) -> Mapping[str, Any]:
        """The question without its messages: the row of a file, or reasoning-gym's own record."""
        return {name: value for name, value in self.question.items() if name != "messages"}

    def field(self, key: str) -> Any:
        """Return a field of the record. Raises EpisodeFailed if it is missing or null, which is not the answer's
        fault."""
        record = self.record
        if record.get(key) is None:
            what = "null in the" if key in record else "no"
            message = f"the question's record has {what} field {key!r}; its fields are {sorted(record)}"
            raise EpisodeFailed("reward_error", message)
        return record[key]

    def until(self, turn: int) -> RewardInput:
        """Return the episode as it stood when this turn, counted from 0, had been written."""
        turns = Trajectory(self.trajectory.turns[: turn + 1])
        return replace(self, text=self.texts[turn], texts=self.texts[: turn + 1], trajectory=turns)


@dataclass(frozen=True)
class Score:
    """Result of a reward. `reward` is the episode's; `turns`, one per turn or empty, are added to the rewards of its
    turns."""

    reward: float
    turns: Sequence[float] = ()
    parts: Mapping[str, float] = field(default_factory=dict)  # named components, for metrics


Result = Score | float | Awaitable[Score | float]


class Reward(Protocol):
    """Interface of a reward. It may also have `async close()`, which closes its connections and processes."""

    @property
    def inline(self) -> bool:
        """True if a call is quick and cannot hang, so that it may run in the event loop; otherwise it runs in a thread.
        An async reward is inline, because its call only creates an awaitable."""
        ...

    @property
    def pure(self) -> bool:
        """True if the same answer to the same question always gets the same score, which may then be cached."""
        ...

    def __call__(self, answer: RewardInput) -> Result:
        """Return the score. Raises EpisodeFailed when the scoring machinery is at fault, not the answer."""
        ...


def checked(value: Score | float, answer: RewardInput) -> Score:
    """Convert a result to a Score of plain finite numbers; parts that are None were not measured and are left out.
    Raises EpisodeFailed("reward_error") for anything else."""
    score = value if isinstance(value, Score) else Score(value)
    try:
        reward = number(score.reward, "the reward")
        turns = [number(one, "the reward of a turn") for one in (() if score.turns is None else score.turns)]
        parts = {
            str(name): number(part, f"part {name} of the reward")
            for name, part in (score.parts or {}).items()
            if part is not None
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise EpisodeFailed("reward_error", str(error)) from None
    if turns and len(turns) != len(answer.texts):
        detail = f"the reward function returned rewards for {len(turns)} turns, but the answer has {len(answer.texts)}"
        raise EpisodeFailed("reward_error", detail)
    return Score(reward, turns or (), parts)


async def close(reward: object) -> None:
    """Close the reward's resources, if it has any."""
    if closing := getattr(reward, "close", None):
        await closing()
