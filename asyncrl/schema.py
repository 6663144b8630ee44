"""Records that cross process boundaries, and the vocabulary of the whole project.

prompt      token ids and what the reward needs to score an answer
completion  one answer of an engine: token ids, their log-probabilities, and the weight versions that generated them
turn        an observation from the environment, then a completion
trajectory  one episode: one or more turns, and its reward
sample      a sequence of turns of a trajectory, each of which continues the tokens of the previous one
fork        a point where an episode continues in several branches; its reward is the mean over them
role        an actor in an episode with several; each has its own samples, rewards and siblings
group       the trajectories of one prompt
image       a PNG file, already of the size that the model reads; its name is the SHA-256 of the file (images.py)
placeholder the one token id that stands for an image, wherever the engine's and the trainer's many are not meant
ticket      permission to play one group: its slot, and the cohort (the batch of slots) that the slot belongs to
batch       the groups that are trained between two versions
publish     sending a version to every engine
version     number of batches trained and published; version 0 is what the run started from
staleness   version being trained minus the oldest version that generated a token of the trajectory

Example: prompt [12, 1, 2, 11], group of two, generated while version 4 was replaced by version 5:

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

POLICY = "policy"
"""Name of what is trained, and of what answers requests, unless an extension has several such."""
Identity = tuple[tuple[int, ...], tuple[bytes, ...], Any]
"""Identity of a question: the rendered text, its images, and the seed if there is one."""


class Prompt(msgspec.Struct, frozen=True):
    """A rendered question: what the engine reads, and what the reward needs."""

    uid: str
    token_ids: list[int]  # [P]
    question: dict[str, Any]  # the task's own record; never leaves the rollout process
    task: str  # name of the task, or of the evaluation set
    index: int = -1  # index of the question in its task
    images: list[bytes] = []  # in the order of their placeholders

    @property
    def identity(self) -> Identity:
        """What makes this question another one."""
        return tuple(self.token_ids), tuple(self.images), self.question.get("seed")

    def copy(self) -> Prompt:
        """Return a copy whose lists an agent may change: its siblings are played at the same time."""
        question = {name: list(value) if isinstance(value, list) else value for name, value in self.question.items()}
        return msgspec.structs.replace(self, token_ids=list(self.token_ids), question=question)


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The version of the weights that generated the tokens [start, end) of a completion."""

    version: int
    start: int
    end: int
    inferred: bool = False  # the oldest possible version, because the stream broke before the engine reported it


class TokenRows(msgspec.Struct, frozen=True, array_like=True):
    """What an extension keeps of each token in a range of a sequence, such as which experts an engine chose for it."""

    start: int  # position of the first token, counted from the start of the prompt
    width: int  # bytes of a token
    rows: bytes

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.rows) // self.width

    def since(self, position: int) -> TokenRows:
        """Return the rows from this position on."""
        skipped = max(0, position - self.start)
        return TokenRows(self.start + skipped, self.width, self.rows[skipped * self.width :])


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """One answer exactly as the engine gave it. It is never recomputed from text."""

    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T] log_softmax(logits / temperature) in the engine's precision
    versions: list[VersionSpan]  # partition [0, T), versions ascending
    finish_reason: str  # "stop" or "length"
    token_rows: TokenRows | None = None  # of an extension: of all tokens read for it, or of new ones

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


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """One request of an episode and its completion. The finish reason of a partial completion is empty."""

    context: list[int]
    completion: Completion
    role: str = ""
    images: list[str] = []
    """Names of the images in the context."""

    @property
    def version(self) -> int | None:
        """Version of its first token, if it has one."""
        versions = self.completion.versions
        return versions[0].version if versions else None

    def follows(self, ids: list[int], images: Sequence[str]) -> bool:
        """Return whether the context begins with these tokens, and its images with these."""
        return self.context[: len(ids)] == ids and self.images[: len(images)] == list(images)


Message = dict[str, Any]
"""Chat message in the form of chat templates and the OpenAI API: role, content, and tool_calls if there are any."""


class Template(Protocol):
    """The model's chat template with its tokenizer: asyncrl/agents/template.py."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Encode a chat from its start, up to where the model continues."""
        ...

    def extend(self, messages: Sequence[Message], *, last: int | None) -> list[int]:
        """Encode what follows a completion whose last token is `last`, up to where the model continues.

        This is the template's end-of-answer token, unless `last` is that token, and then these messages.
        """
        ...

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Encode a text. With `begins` it starts a context and gets the tokenizer's prefix, such as <bos>."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text without special tokens."""
        ...

    @property
    def end(self) -> str:
        """Text of the token that ends an answer."""
        ...


class Generate(Protocol):
    """Interface of an agent to the policy."""

    @property
    def template(self) -> Template:
        """Template that converts chats to tokens."""
        ...

    @property
    def temperature(self) -> float:
        """Sampling temperature of the tokens that are trained (rollout.temperature); an evaluation has its own."""
        ...

    async def __call__(
        self,
        token_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        role: str = "",
        images: Sequence[bytes] = (),
        stop: Sequence[str] = (),
    ) -> Completion:
        """Continue exactly these token ids, by at most max_new_tokens (default: rollout.max_new_tokens), and up to the
        token that completes one of the texts `stop`, or of rollout.stop.

        `images` has one image for each placeholder in the ids, in order: those of the prompt, and what the method
        `images` returned. If the model's context has no room for another token, the completion is empty and its finish
        reason is "length".
        `role` names the actor in an episode with several. Raises EngineError when the fleet cannot answer.
        """
        ...

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the images of messages (asyncrl/images.py) in order, in the form that the model reads. Raises
        ImageRefused."""
        ...


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """An observation, appended to the context, and the completion that follows it.

    The observation of the first turn, which follows the prompt, is empty. A turn that `begins` a sample follows
    nothing: its observation is the whole context, in place of the prompt. Each turn follows the previous one, unless
    `fork` makes it an alternative continuation of an earlier turn.

    Rewards of turns and tokens are kept separately from the trajectory's reward. Algorithms that use only rewards of
    whole episodes add them to it.
    """

    observation: list[int]
    completion: Completion
    reward: float = 0.0
    token_rewards: list[float] = []  # [T], or empty
    teacher: list[float] = []  # [T] the teacher's log-probabilities of the completion's tokens, or empty without one
    begins: bool = False
    role: str = ""
    state: str = ""  # name of the environment state it acted in, for algorithms that compare turns in one state
    fork: int | None = None  # index of the turn that it follows, or -1; such a turn begins a sample
    images: list[str] = []  # names, in the order of the placeholders in the observation

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
    """One episode. A reward of None means that the task has yet to score it; an agent may score it instead."""

    turns: list[Turn]
    reward: float | None = None

    def __post_init__(self) -> None:
        for place, turn in enumerate(self.turns):
            if turn.fork is not None and not (turn.begins and -1 <= turn.fork < place):
                raise ValueError(
                    f"turn {place} cannot fork behind turn {turn.fork}: it must begin a sample, and come later"
                )

    @property
    def total(self) -> float:
        """Reward including those of turns and tokens, over all roles. If the episode forks, branches are averaged."""
        return (self.reward or 0.0) + sum(self._rewards())

    def totals(self) -> dict[str, float]:
        """Return the total reward of each role, sorted by role: the rewards of its own turns plus the shared reward."""
        rewards, turns = self._rewards(), sorted(self.by_role().items())
        return {role: (self.reward or 0.0) + sum(rewards[place] for place, _ in own) for role, own in turns}

    def _rewards(self) -> list[float]:
        """Return what each turn contributes to the episode's reward."""
        shares = self.shares()
        return [s * (turn.reward + sum(turn.token_rewards)) for s, turn in zip(shares, self.turns, strict=True)]

    def parents(self) -> list[int]:
        """Return for each turn the index of the turn that it follows, or -1."""
        return [place - 1 if turn.fork is None else turn.fork for place, turn in enumerate(self.turns)]

    def shares(self) -> list[float]:
        """Return the weight of each turn: 1, divided equally among the branches at each fork."""
        parents, found = self.parents(), list[float]()
        ways = Counter(parents)
        for parent in parents:
            found.append((found[parent] if parent >= 0 else 1.0) / ways[parent])
        return found

    def ways(self) -> list[list[int]]:
        """Return the turn indices of each branch, from the first turn to a last one. An episode without forks has a
        single branch."""
        found, parents = list[list[int]](), self.parents()
        for end in sorted(set(range(len(parents))) - set(parents)):
            way = [end]
            while parents[way[-1]] >= 0:
                way.append(parents[way[-1]])
            found.append(way[::-1])
        return found

    def by_role(self) -> dict[str, list[tuple[int, Turn]]]:
        """Return the turns of each role, with their indices in the trajectory."""
        found: dict[str, list[tuple[int, Turn]]] = {}
        for place, turn in enumerate(self.turns):
            found.setdefault(turn.role, []).append((place, turn))
        return found

    def samples(self) -> list[list[tuple[int, Turn]]]:
        """Return the turns with their indices, grouped into samples, role after role.

        A sample starts at the first turn of a role and at every turn that `begins` one.
        """
        found: list[list[tuple[int, Turn]]] = []
        for turns in self.by_role().values():
            for number, (place, turn) in enumerate(turns):
                if turn.begins or not number:
                    found.append([])
                found[-1].append((place, turn))
        return found

    @property
    def cuts(self) -> int:
        """Number of times that a role's context did not continue its previous tokens.

        The cause is an edit or the chat template. Forks are not counted.
        """
        firsts = {turns[0][0] for turns in self.by_role().values()}
        return sum(turn.begins and turn.fork is None and place not in firsts for place, turn in enumerate(self.turns))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy generated."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Oldest version that generated a token. Raises ValueError when there is none."""
        return min(span.version for turn in self.turns for span in turn.completion.versions)


class Group(msgspec.Struct, frozen=True, array_like=True):
    """The scored siblings of one prompt."""

    uid: str
    slot: int
    prompt_ids: list[int]  # [P]
    trajectories: list[Trajectory]  # [G]
    task: str  # name of the prompt's task
    token_rows: TokenRows | None = None  # of the prompt, stored once for all siblings
    prompt_images: list[str] = []  # names, in the order of the placeholders in the prompt
    images: dict[str, bytes] = {}  # every image of the group, by name

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy generated."""
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each trajectory."""
        return [trajectory.num_tokens for trajectory in self.trajectories]

    @property
    def rewards(self) -> list[float]:
        """Total reward of each trajectory."""
        return [trajectory.total for trajectory in self.trajectories]

    @property
    def has_signal(self) -> bool:
        """True if any advantage can differ from 0.

        The rewards of a role differ between trajectories, or a trajectory forks, so that its branches may differ.
        """
        forks = any(turn.fork is not None for one in self.trajectories for turn in one.turns)
        return forks or any(one.totals() != self.trajectories[0].totals() for one in self.trajectories)

    def staleness(self, version: int) -> list[int]:
        """Return the staleness of each trajectory when trained as batch `version`."""
        return [version - trajectory.oldest_version for trajectory in self.trajectories]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The groups with which the trainer updates version `version` to `version + 1`, or a part of them."""

    version: int
    groups: list[Group]
    rollout: dict[str, float]  # statistics of the rollout side since the previous batch; only the last part has some
    last: bool = True  # whether no further part of this batch follows


def part_of(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range [start, end) of the groups of part number `part`, of a batch of `count` in `parts` parts."""
    return count * part // parts, count * (part + 1) // parts


def encode(record: object) -> bytes:
    """Encode a record as msgpack, the format of all messages between processes."""
    return _encode(record)


def _data(value: object) -> msgspec.Raw:
    """Return the bytes of a group that another process has encoded, as the stand-in for it holds them in `data`."""
    data = getattr(value, "data", None)
    if isinstance(data, bytes):
        return msgspec.Raw(data)
    raise TypeError(f"{type(value).__name__} cannot be encoded")


_encode = msgspec.msgpack.Encoder(enc_hook=_data).encode


def decode_batch(data: bytes) -> Batch:
    """Decode a batch. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=Batch)


def number(value: object, what: str) -> float:
    """Convert a user's number, which may be a scalar of numpy or torch, to a Python float. Raises ValueError for
    anything else, and for values that are not finite."""
    try:
        found = float("nan") if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not math.isfinite(found):
        raise ValueError(f"{what} is {value!r}: it must be a finite number")
    return found
