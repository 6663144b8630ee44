"""Packed events are unpacked without loss."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RecordError
from asyncrl.extensions.recording import events
from asyncrl.extensions.recording.events import Committed, Event, PackedGroup, decode, packed, unpacked
from asyncrl.rollout.events import Admitted, Taken
from asyncrl.schema import Completion, Group, TokenRows, Trajectory, Turn, VersionSpan

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
engine_floats = st.floats(width=32, allow_nan=False)
any_floats = st.floats(allow_nan=False)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Draw turns whose log-probabilities are float32, as from an engine, or need float64."""
    tokens = draw(ids)
    n = len(tokens)
    cut = draw(st.integers(0, n))
    spans = [VersionSpan(3, 0, cut), VersionSpan(4, cut, n, inferred=draw(st.booleans()))]

    def numbers(of: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(of, min_size=n, max_size=n))

    routing = draw(st.none() | st.builds(TokenRows, st.integers(0, 9), st.just(2), st.binary(max_size=8)))
    answer = Completion(tokens, numbers(draw(st.sampled_from([engine_floats, any_floats]))), spans, "stop", routing)
    rewards = numbers(any_floats) if draw(st.booleans()) else []
    teacher, fork = numbers(engine_floats) if draw(st.booleans()) else [], draw(st.sampled_from([None, -1]))
    begins, role, state = fork is not None or draw(st.booleans()), draw(st.sampled_from(["", "black"])), draw(st.text())
    images = draw(st.lists(st.sampled_from(["a" * 64, "b" * 64]), max_size=2))
    return Turn(draw(ids), answer, draw(any_floats), rewards, teacher, begins, role, state, fork, images)


groups = st.builds(
    Group,
    st.text(max_size=8),
    st.integers(0, 10**6),
    ids,
    st.lists(st.builds(Trajectory, st.lists(turns(), max_size=3), any_floats), max_size=3),
    st.text(max_size=8),
)


def content(told: list[Event]) -> bytes:
    """Return the content of a frame with these events."""
    return b"".join(events.frame_of([events.encode(event) for event in told]))  # type: ignore[arg-type]


@given(groups)
def test_group_comes_back_to_the_last_bit(group: Group) -> None:
    (event,) = decode(content([Committed(1, packed(group), 3)]))
    assert isinstance(event, Committed)
    assert msgspec.msgpack.encode(unpacked(event.group)) == msgspec.msgpack.encode(group)


def test_log_probabilities_of_an_engine_take_four_bytes_each() -> None:
    logprobs = [float(np.float32(-0.1 * i)) for i in range(1, 101)]
    for values, width in ((logprobs, 4), ([-0.1, *logprobs[1:]], 8)):
        answer = Completion(list(range(100)), values, [VersionSpan(0, 0, 100)], "stop")
        turn = packed(Group("g", 0, [], [Trajectory([Turn([], answer)])], "t")).trajectories[0][0][0]
        assert (len(turn.token_ids), len(turn.logprobs)) == (400, 100 * width)


def test_events_keep_their_kind_and_order() -> None:
    told: list[Event] = [
        Admitted(0, 2, 3, "p0", 4),
        Taken(7, ["g1", "g0"], {"x": 1.5}),
        Admitted(1, 2, 3, "p1", 4),
    ]
    assert decode(content(told)) == told


@pytest.mark.parametrize("change", [{"logprobs": b"12345"}, {"token_ids": b"123"}, {"versions": []}])
def test_arrays_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    answer = Completion([1, 2], [-0.5, -1.0], [VersionSpan(0, 0, 2)], "stop")
    whole = packed(Group("g7", 7, [1], [Trajectory([Turn([], answer)])], "t"))
    turn = msgspec.structs.replace(whole.trajectories[0][0][0], **change)
    damaged: PackedGroup = msgspec.structs.replace(whole, trajectories=[([turn], 0.0)])
    with pytest.raises(RecordError, match="g7 is damaged"):
        unpacked(damaged)
