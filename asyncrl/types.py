"""The records that cross process borders, and the words of the whole project.

prompt      token ids and what the reward needs to score an answer
completion  one answer of an engine: token ids, their log-probabilities, and which weights wrote them
turn        what the environment said, then a completion
trajectory  one episode: one or more turns, and its reward
group       the trajectories of one prompt
batch       the groups that are trained between two versions
version     number of batches trained and published; version 0 is what the run started from
staleness   version being trained minus the oldest version that wrote a token of the sample

Example: prompt [12, 1, 2, 11], group of two, written while version 4 was replaced by version 5:

    Group(uid="g00000007", slot=7, prompt_ids=[12, 1, 2, 11], trajectories=[
        Trajectory(turns=[Turn([], Completion([1, 2], [-0.1, -0.3], [VersionSpan(4, 0, 2)], "stop"))], reward=1.0),
        Trajectory(turns=[Turn([], Completion([1, 7, 2], [-0.1, -2.1, -0.4],
                                              [VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)], "length"))], reward=0.0)],
          task="copy3")

Trained as batch 6, its staleness is 6 - 4 = 2.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """A question, rendered: what the engine reads, and what the reward needs."""

    uid: str
    token_ids: list[int]  # [P]
    question: dict[str, Any]  # the task's own record; never leaves the rollout process
    task: str  # name of the task, or of the evaluation set
    index: int = -1  # of the question in its task


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start..end (end excluded) of a completion were written by this version of the weights."""

    version: int
    start: int
    end: int
    inferred: bool = False  # the stream broke before the engine told: the oldest version that they can have


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """Which experts read each token of a stretch of a sequence, in the form of asyncrl/routing.py."""

    start: int  # position of the first token, counted from the start of the prompt
    width: int  # bytes of a token
    rows: bytes

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.rows) // self.width

    def since(self, position: int) -> Routing:
        """The rows from this position on; those before are left out."""
        skipped = max(0, position - self.start)
        return Routing(self.start + skipped, self.width, self.rows[skipped * self.width :])


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """One answer as the engine gave it. Never recomputed from text."""

    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T] log_softmax(logits / temperature) in the engine's precision
    versions: list[VersionSpan]  # partition [0, T), versions ascending
    finish_reason: str  # "stop" or "length"
    routing: Routing | None = None  # with algo.routing_replay=R3: of all tokens read for it, or those not told before

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids with {len(self.logprobs)} log-probabilities")
        covered = 0
        for span in self.versions:
            if span.start != covered:
                raise ValueError(f"version spans {self.versions} do not partition {len(self.token_ids)} tokens")
            covered = span.end
        if covered != len(self.token_ids):
            raise ValueError(f"version spans {self.versions} do not cover {len(self.token_ids)} tokens")


class Generate(Protocol):
    """The policy, as an agent sees it: continue exactly these token ids. Raises EngineError when the fleet cannot."""

    async def __call__(self, token_ids: list[int]) -> Completion: ...


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """`observation` is what was appended before the completion; empty in the first turn, which follows the prompt.

    Rewards of single turns and tokens stand beside that of the trajectory, and are added to it where an algorithm knows
    only whole episodes.
    """

    observation: list[int]
    completion: Completion
    reward: float = 0.0
    token_rewards: list[float] = []  # [T], or empty
    teacher: list[float] = []  # [T] the teacher's log-probabilities of the completion's tokens, or empty without one

    def __post_init__(self) -> None:
        if self.teacher and len(self.teacher) != len(self.completion.token_ids):
            raise ValueError(
                f"{len(self.teacher)} log-probabilities of the teacher for {len(self.completion.token_ids)} tokens"
            )
        if self.token_rewards and len(self.token_rewards) != len(self.completion.token_ids):
            raise ValueError(
                f"{len(self.token_rewards)} token rewards for {len(self.completion.token_ids)} tokens of a turn"
            )


class Trajectory(msgspec.Struct, frozen=True, array_like=True):
    """One episode."""

    turns: list[Turn]
    reward: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """The oldest version that wrote a token."""
        return min(span.version for turn in self.turns for span in turn.completion.versions)


class Group(msgspec.Struct, frozen=True, array_like=True):
    """The siblings of one prompt, scored."""

    uid: str
    slot: int
    prompt_ids: list[int]  # [P]
    trajectories: list[Trajectory]  # [G]
    task: str  # name of the prompt's task
    routing: Routing | None = None  # of the prompt, once for all siblings

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    def staleness(self, version: int) -> list[int]:
        """Per trajectory, when trained as batch `version`."""
        return [version - trajectory.oldest_version for trajectory in self.trajectories]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer turns from version `version` into version `version + 1`."""

    version: int
    groups: list[Group]
    rollout: dict[str, float]  # the rollout side's figures since the batch before


def encode(record: msgspec.Struct) -> bytes:
    """msgpack, as every hop of the system speaks it."""
    return msgspec.msgpack.encode(record)


def decode_batch(data: bytes) -> Batch:
    """The inverse of `encode` for a batch; raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.decode(data, type=Batch)
