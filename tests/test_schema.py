"""The records that cross process borders: whole, or refused."""

from __future__ import annotations

import msgspec
import pytest

from asyncrl.schema import Batch, Completion, Trajectory, Turn, VersionSpan, decode_batch, encode, part_of
from tests.fakes import completion, group


def test_batch_survives_the_wire() -> None:
    batch = Batch(3, [group(0, [0.5, 1.0], tokens=4, versions=(1, 2)), group(1)], {"groups/ready": 2.0})
    assert decode_batch(encode(batch)) == batch


@pytest.mark.parametrize(("count", "parts"), [(8, 1), (8, 2), (8, 3), (9, 4), (5, 5), (2, 3)])
def test_parts_hold_every_group_once_and_are_nearly_equal(count: int, parts: int) -> None:
    ranges = [range(*part_of(count, part, parts)) for part in range(parts)]
    assert [place for part in ranges for place in part] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("data", [b"", b"\x00", b"not a batch", encode(group(0))])
def test_anything_else_on_the_wire_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(data)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "spans"),
    [
        ([1, 2], [-0.1], [(0, 0, 2)]),
        ([1, 2], [-0.1, -0.2], [(0, 0, 1)]),
        ([1, 2], [-0.1, -0.2], [(0, 0, 3)]),
        ([1, 2], [-0.1, -0.2], [(0, 1, 2)]),
        ([1, 2], [-0.1, -0.2], [(0, 0, 2), (1, 1, 2)]),
        ([1, 2], [-0.1, -0.2], []),
    ],
)
def test_completion_with_unfit_parts_is_refused(tokens, logprobs, spans) -> None:
    with pytest.raises(ValueError):
        Completion(tokens, logprobs, [VersionSpan(*span) for span in spans], "stop")
    whole = msgspec.to_builtins(Batch(0, [group(0)], {}))
    whole[1][0][3][0][0][0][1] = [tokens, logprobs, spans, "stop"]
    with pytest.raises(msgspec.ValidationError):
        decode_batch(msgspec.msgpack.encode(whole))


def test_trajectory_is_as_old_as_its_oldest_token_in_any_turn() -> None:
    played = Trajectory([Turn([], completion(3, (5, 6))), Turn([1, 2], completion(2, (4,)))])
    assert played.oldest_version == 4
    assert played.num_tokens == 5  # observations are not the policy's
    assert group(0, versions=(4, 5)).staleness(6) == [2, 2]
    assert group(0, tokens=3).num_tokens == 6


def forked(*rewards: float, role: str = "", reward: float = 0.0) -> Trajectory:
    """A turn, behind which it goes on in as many ways as there are further rewards."""
    first = Turn([], completion(1), rewards[0])
    ways = [
        Turn([1] if not n else [12, 1], completion(1), one, begins=n > 0, role=role, fork=0 if n else None)
        for n, one in enumerate(rewards[1:])
    ]
    return Trajectory([first, *ways], reward)


def test_forking_episodes_reward_is_the_mean_of_its_ways() -> None:
    assert forked(1.0, 2.0, 4.0, reward=8.0).total == 8.0 + 1.0 + 3.0
    assert forked(1.0, 2.0, 4.0, role="other").totals() == {"": 1.0, "other": 3.0}
    assert forked(1.0, 2.0, 4.0).parents() == [-1, 0, 0]
    turns = [*forked(1.0, 2.0, 4.0).turns, Turn([5], completion(1)), Turn([12], completion(1), begins=True, fork=2)]
    turns += [Turn([12], completion(1), begins=True, fork=-1)]
    assert Trajectory(turns).parents() == [-1, 0, 0, 2, 2, -1]
    assert Trajectory(turns).shares() == [1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 2]


def test_ways_lead_from_the_beginning_to_every_end() -> None:
    turns = [*forked(1.0, 2.0, 4.0).turns, Turn([5], completion(1)), Turn([12], completion(1), begins=True, fork=-1)]
    assert Trajectory(turns).ways() == [[0, 1], [0, 2, 3], [4]]
    assert Trajectory(turns[:2]).ways() == [[0, 1]]


def test_ways_of_one_episode_are_something_to_compare() -> None:
    assert not group(0, [1.0, 1.0]).has_signal
    whole = group(0, [1.0])
    assert not whole.has_signal
    assert msgspec.structs.replace(whole, trajectories=[forked(0.0, 1.0, 0.0)]).has_signal


@pytest.mark.parametrize(("place", "begins"), [(0, False), (1, True), (2, True), (-2, True)])
def test_fork_at_no_turn_or_inside_a_sample_is_refused(place: int, begins: bool) -> None:
    with pytest.raises(ValueError, match=f"turn 1 cannot fork behind turn {place}"):
        Trajectory([Turn([], completion(1)), Turn([12], completion(1), begins=begins, fork=place)])
