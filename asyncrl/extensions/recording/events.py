"""Events of a recording, in the order in which they happened. An event is msgpack, tagged with its kind.

A group's numbers are stored as arrays: token ids as int32, log-probabilities and token rewards as float32 if that is
exact (an engine's are), otherwise as float64; all little-endian. `packed` and `unpacked` are exact inverses of each
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import frames
from asyncrl.extensions.recording.frames import Compressed
from asyncrl.rollout.events import Adjusted, Admitted, Began, PartTaken, Published, Saved, Taken
from asyncrl.schema import Completion, Group, TokenRows, Trajectory, Turn, VersionSpan


class PackedTurn(msgspec.Struct, frozen=True, array_like=True):
    """A turn of a trajectory; the length of a logprob array gives its precision."""

    observation: bytes
    token_ids: bytes
    logprobs: bytes
    versions: list[VersionSpan]
    finish_reason: str
    reward: float
    token_rewards: bytes
    teacher: bytes
    token_rows: TokenRows | None
    begins: bool = False
    role: str = ""
    state: str = ""
    fork: int | None = None
    images: list[str] = []


class PackedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group with its arrays as bytes, and the names of its images (images.py)."""

    uid: str
    slot: int
    prompt_ids: bytes
    trajectories: list[tuple[list[PackedTurn], float]]
    task: str
    token_rows: TokenRows | None
    prompt_images: list[str] = []
    images: list[str] = []


class CompressedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A packed group, encoded and compressed: stands in for it in an event that is written."""

    uid: str
    images: list[str]
    content: Compressed


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A group was handed in; engines also generated `discarded` tokens that are not in it."""

    slot: int
    group: PackedGroup
    discarded: int


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A group was rejected; its content is included if it was played to the end."""

    slot: int
    reason: str
    tokens: int
    group: PackedGroup | None = None


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The trainer's log-probabilities of a batch's tokens, in the order of its groups; NaN where it computed none."""

    step: int
    logprobs: bytes  # [N] float32


Event = Began | Admitted | Committed | Rejected | PartTaken | Taken | Adjusted | Published | Saved | Scored
_decoder = msgspec.msgpack.Decoder(list[Event])
_encode = msgspec.msgpack.Encoder().encode
_NO_GROUP = _encode("group") + _encode(None)


def encode(event: object) -> list[bytes | Compressed]:
    """Encode one event, or one record of a timeline, in parts that follow each other."""
    group = event.group if isinstance(event, Committed | Rejected) else None
    if not isinstance(group, CompressedGroup):
        return [_encode(event)]
    before, after = _encode(msgspec.structs.replace(event, group=None)).split(_NO_GROUP)  # no text contains it
    return [before + _NO_GROUP[:-1], group.content, after]


def frame_of(encoded: Sequence[Sequence[bytes | Compressed]]) -> list[bytes | Compressed]:
    """Join encoded events into the content of a frame."""
    count = len(encoded)
    return [_encode([None] * count)[:-count], *chain(*encoded)]


def decode(data: bytes) -> list[Event]:
    """Decode the events of a frame. Raises RecordError if it holds anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:  # includes errors raised by the records' own validation
        raise RecordError(f"a frame holds no events: {error}") from None


def packed(group: Group) -> PackedGroup:
    """Pack a group's arrays as bytes."""
    trajectories = [
        ([_pack_turn(turn) for turn in one.turns], 0.0 if one.reward is None else one.reward)
        for one in group.trajectories
    ]
    return PackedGroup(
        group.uid,
        group.slot,
        _ids(group.prompt_ids),
        trajectories,
        group.task,
        group.token_rows,
        group.prompt_images,
        list(group.images),
    )


def compressed(group: Group) -> CompressedGroup:
    """Pack, encode and compress a group, for an event that another process writes."""
    content = packed(group)
    return CompressedGroup(group.uid, content.images, frames.compress(_encode(content)))


def unpacked(group: PackedGroup, images: Mapping[str, bytes] | None = None) -> Group:
    """Unpack a group, with its images if they are given. Raises RecordError if its arrays do not fit together."""
    try:
        trajectories = [
            Trajectory([_unpack_turn(turn) for turn in turns], reward) for turns, reward in group.trajectories
        ]
        prompt = _ids_of(group.prompt_ids)
        named, images = group.prompt_images, dict(images or {})
        return Group(group.uid, group.slot, prompt, trajectories, group.task, group.token_rows, named, images)
    except ValueError as error:
        raise RecordError(f"group {group.uid} is damaged: {error}") from None


def num_tokens(turn: PackedTurn) -> int:
    """Return the number of tokens that the policy wrote in a turn."""
    return len(turn.token_ids) // 4


def token_rewards(turn: PackedTurn) -> list[float]:
    """Return the rewards of its tokens. Raises RecordError if they do not fit the tokens."""
    try:
        return _floats_of(turn.token_rewards, num_tokens(turn))
    except ValueError as error:
        raise RecordError(f"a turn is damaged: {error}") from None


def scored(step: int, logprobs: Sequence[float]) -> Scored:
    """Pack the log-probabilities of a batch."""
    return Scored(step, np.array(logprobs, "<f4").tobytes())


def _pack_turn(turn: Turn) -> PackedTurn:
    answer = turn.completion
    return PackedTurn(
        _ids(turn.observation),
        _ids(answer.token_ids),
        _floats(answer.logprobs),
        answer.versions,
        answer.finish_reason,
        turn.reward,
        _floats(turn.token_rewards),
        _floats(turn.teacher),
        answer.token_rows,
        turn.begins,
        turn.role,
        turn.state,
        turn.fork,
        turn.images,
    )


def _unpack_turn(turn: PackedTurn) -> Turn:
    ids = _ids_of(turn.token_ids)

    def floats(data: bytes) -> list[float]:
        return _floats_of(data, len(ids))

    completion = Completion(ids, floats(turn.logprobs), turn.versions, turn.finish_reason, turn.token_rows)
    return Turn(
        _ids_of(turn.observation),
        completion,
        turn.reward,
        floats(turn.token_rewards),
        floats(turn.teacher),
        turn.begins,
        turn.role,
        turn.state,
        turn.fork,
        turn.images,
    )


def _ids(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _ids_of(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, "<i4").tolist()
    return found


def _floats(values: list[float]) -> bytes:
    wide = np.array(values, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    return (narrow if bool((narrow == wide).all()) else wide).tobytes()


def _floats_of(data: bytes, count: int) -> list[float]:
    """Return `count` numbers, or none."""
    if len(data) not in (0, 4 * count, 8 * count):
        raise ValueError(f"{len(data)} bytes do not fit {count} numbers")
    found: list[float] = np.frombuffer(data, "<f4" if len(data) == 4 * count else "<f8").tolist()
    return found
