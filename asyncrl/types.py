"""The records that cross process borders, and the words of the whole project.

prompt      token ids and what the reward needs to score an answer
completion  one answer of an engine: token ids, their log-probabilities, and which weights wrote them
turn        what the environment said, then a completion
trajectory  one episode: one or more turns, and its reward
sample      a stretch of turns of a trajectory, each of which goes on from the tokens of the one before
fork        where an episode goes on in several ways; its reward is the mean over them
role        who acts in an episode of several: each has samples, rewards and siblings of its own
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

import math
from collections import Counter
from collections.abc import Sequence
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


Message = dict[str, Any]
"""Of a chat, in the form of chat templates and of the OpenAI API: role, content, and tool_calls where there are any."""


class Template(Protocol):
    """The model's chat template over its tokenizer: asyncrl/agents/template.py."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """A chat from its start, up to where the model writes."""
        ...

    def extend(self, messages: Sequence[Message], *, last: int | None) -> list[int]:
        """What follows a completion whose last token is `last`: its end, unless that is it, and these messages, up to
        where the model writes again."""
        ...

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """A text; one that begins a context gets what the tokenizer begins with, such as <bos>."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        ...

    @property
    def end(self) -> str:
        """The text of the token that ends an answer."""
        ...


class Generate(Protocol):
    """The policy, as an agent sees it."""

    @property
    def template(self) -> Template:
        """How chats become tokens."""
        ...

    @property
    def temperature(self) -> float:
        """At which tokens are drawn that are trained (rollout.temperature); an evaluation has its own."""
        ...

    async def __call__(self, token_ids: list[int], *, max_new_tokens: int | None = None, role: str = "") -> Completion:
        """Continue exactly these token ids, by at most so many (unset: rollout.max_new_tokens). Where the model's
        context has no room for one more the completion is empty and ends by "length". Raises EngineError when the fleet
        cannot. `role`: for whom, in an episode of several."""
        ...


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """`observation` is what was appended before the completion; empty in the first turn, which follows the prompt. A
    turn that `begins` a sample follows nothing: its observation is the whole context, in the prompt's place. Each turn
    comes after the one before it; with `fork` it is another way to go on from a turn further up.

    Rewards of single turns and tokens stand beside that of the trajectory, and are added to it where an algorithm knows
    only whole episodes.
    """

    observation: list[int]
    completion: Completion
    reward: float = 0.0
    token_rewards: list[float] = []  # [T], or empty
    teacher: list[float] = []  # [T] the teacher's log-probabilities of the completion's tokens, or empty without one
    begins: bool = False
    role: str = ""
    state: str = ""  # names the environment's state in which it acted, for algorithms that compare turns in one state
    fork: int | None = None  # place in the trajectory of the turn that it comes after, -1: none; it begins a sample

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
    """One episode. Without a reward it has yet to be scored: an agent that gives one has scored it itself."""

    turns: list[Turn]
    reward: float | None = None

    def __post_init__(self) -> None:
        for place, turn in enumerate(self.turns):
            if turn.fork is not None and not (turn.begins and -1 <= turn.fork < place):
                raise ValueError(
                    f"turn {place} cannot fork behind turn {turn.fork}: it must begin a sample, and follow"
                )

    @property
    def total(self) -> float:
        """Its reward, with those of its turns and tokens, over all roles; the mean over its ways where it forks."""
        return (self.reward or 0.0) + sum(self._rewards())

    def totals(self) -> dict[str, float]:
        """Of each role, in the order of their names: what it gets of this, and of the reward that all share."""
        rewards, turns = self._rewards(), sorted(self.by_role().items())
        return {role: (self.reward or 0.0) + sum(rewards[place] for place, _ in own) for role, own in turns}

    def _rewards(self) -> list[float]:
        """What each turn adds to that of the episode."""
        shares = self.shares()
        return [s * (turn.reward + sum(turn.token_rewards)) for s, turn in zip(shares, self.turns, strict=True)]

    def parents(self) -> list[int]:
        """Place of the turn that each turn comes after, -1: none."""
        return [place - 1 if turn.fork is None else turn.fork for place, turn in enumerate(self.turns)]

    def shares(self) -> list[float]:
        """Of each turn: 1, and where the episode forks an equal part of that for each way that goes on there."""
        parents, found = self.parents(), list[float]()
        ways = Counter(parents)
        for parent in parents:
            found.append((found[parent] if parent >= 0 else 1.0) / ways[parent])
        return found

    def ways(self) -> list[list[int]]:
        """Places of the turns on each way from the beginning to an end; one, if it does not fork."""
        found, parents = list[list[int]](), self.parents()
        for end in sorted(set(range(len(parents))) - set(parents)):
            way = [end]
            while parents[way[-1]] >= 0:
                way.append(parents[way[-1]])
            found.append(way[::-1])
        return found

    def by_role(self) -> dict[str, list[tuple[int, Turn]]]:
        """The turns of each role, with their places among all."""
        found: dict[str, list[tuple[int, Turn]]] = {}
        for place, turn in enumerate(self.turns):
            found.setdefault(turn.role, []).append((place, turn))
        return found

    def samples(self) -> list[list[tuple[int, Turn]]]:
        """Its turns, with their places, cut where one begins a sample: role after role."""
        found: list[list[tuple[int, Turn]]] = []
        for turns in self.by_role().values():
            for number, (place, turn) in enumerate(turns):
                if turn.begins or not number:
                    found.append([])
                found[-1].append((place, turn))
        return found

    @property
    def cuts(self) -> int:
        """How often a role's context did not go on from the tokens before it: an edit, or a template, broke them."""
        firsts = {turns[0][0] for turns in self.by_role().values()}
        return sum(turn.begins and turn.fork is None and place not in firsts for place, turn in enumerate(self.turns))

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """The oldest version that wrote a token. ValueError when none did."""
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

    @property
    def has_signal(self) -> bool:
        """Whether some role of a trajectory was rewarded otherwise than in another, or one forks, so that its ways may
        differ: else no advantage is left."""
        forks = any(turn.fork is not None for one in self.trajectories for turn in one.turns)
        return forks or any(one.totals() != self.trajectories[0].totals() for one in self.trajectories)

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


def number(value: object, what: str) -> float:
    """A number of a user's as a float of ours: numpy's and torch's scalars too. Raises ValueError for anything else,
    and for what is not finite."""
    try:
        found = float("nan") if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not math.isfinite(found):
        raise ValueError(f"{what} is {value!r}, and must be a finite number")
    return found
