"""Every moment of an episode is accounted for: what was done for it, its agent in between, and the wait at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.client import GenerationClient
from asyncrl.errors import EpisodeFailed
from asyncrl.observability.intervals import (
    AGENT,
    DECODE,
    ENVIRONMENT,
    PREFILL,
    QUEUED,
    RETRY,
    REWARD,
    TOOL,
    WAITING,
    Activity,
    Interval,
    Ongoing,
    request,
)
from tests.engine.asking import PROMPT, asked
from tests.fakes import FakeEngine, completion, pieces, stream, until


def test_nothing_is_recorded_outside_of_an_episode() -> None:
    activity = Activity()
    with pytest.raises(EpisodeFailed), activity.spent(REWARD, "math"):
        raise EpisodeFailed("judge", "x" * 1000)
    assert len(activity.closed[0].outcome) == 200
    assert activity.open == []
    with pytest.raises(OSError), activity.spent(TOOL, "näme \ud800"):
        raise OSError("caf\xe9 \udcff")
    assert (activity.closed[1].name, activity.closed[1].outcome) == ("näme ?", "café ?")
    msgspec.msgpack.encode(activity.closed)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.booleans()), max_size=6), st.floats(0, 12))
def test_intervals_cover_an_episode_to_its_groups_end(spans: list[tuple[float, float, bool]], ended: float) -> None:
    activity = Activity()
    activity.began, activity.ended = 100.0, 100.0 + ended
    for start, seconds, closed in spans:
        if closed:
            activity.closed.append(Interval(TOOL, 100 + start, 100 + start + seconds))
        else:
            activity.open.append(Ongoing(TOOL, 100 + start, "t"))
    found = activity.intervals(120.0)
    assert [one.start for one in found] == sorted(one.start for one in found)
    covered = 100.0
    for one in found:
        assert one.start - covered <= 0.0011
        covered = max(covered, one.end)
    assert covered >= 119.99
    assert sum(one.phase == WAITING for one in found) == (ended < 19.99)


def test_decoding_is_split_at_the_publishes_between_its_versions() -> None:
    one = Ongoing(PREFILL, 10.0, "guesser", first=12.0)
    found = request(one, 20.0, [(3, 5), (4, 1), (5, 4)], {4: 13.0, 5: 11.0}, queued=1.5)
    assert [(i.phase, i.start, i.end, i.version) for i in found] == [
        (QUEUED, 10.0, 11.5, -1),
        (PREFILL, 11.5, 12.0, -1),
        (DECODE, 12.0, 13.0, 3),
        (DECODE, 13.0, 13.0, 4),  # a publish that is told too early does not turn time back
        (DECODE, 13.0, 20.0, 5),
    ]
    unknown = request(one, 20.0, [(3, 3), (4, 1)])
    assert [(i.start, i.end) for i in unknown[1:]] == [(12.0, 18.0), (18.0, 20.0)]  # in proportion to the tokens
    (refused,) = request(Ongoing(PREFILL, 10.0, ""), 11.0, outcome="503")
    assert (refused.phase, refused.outcome) == (PREFILL, "503")


def test_each_sibling_has_its_own_intervals_of_a_shared_request() -> None:
    def answer(call: dict[str, Any]) -> bytes:
        return stream(
            event
            for index in range(call["sampling_params"]["n"])
            for event in pieces(completion(tokens=4, versions=(0, 1)), index, queue_time=0.5)
        )

    async def play(client: GenerationClient) -> list[list[Interval]]:
        client.inflight.hold()
        client.inflight.release(1)
        sessions = [client.generate(group="g") for _ in range(2)]
        await asyncio.gather(*(session(PROMPT) for session in sessions))
        assert [session.activity.requests for session in sessions] == [1, 1]
        return [session.activity.closed for session in sessions]

    for found in asked(FakeEngine(answer), play):
        assert [(one.phase, one.version) for one in found] == [(QUEUED, -1), (PREFILL, -1), (DECODE, 0), (DECODE, 1)]


def test_broken_stream_is_two_requests_with_a_retry_between() -> None:
    broken = iter([True])

    def answer(call: dict[str, Any]) -> Any:
        events = pieces(completion(tokens=4), size=2)
        if next(broken, False):
            return [stream(events[:1]).removesuffix(b"data: [DONE]\n\n"), httpx.ReadError("reset")]
        return stream(pieces(completion(tokens=2)))

    async def play(client: GenerationClient) -> list[Interval]:
        session = client.generate()
        await session(PROMPT)
        return session.activity.closed

    found = asked(FakeEngine(answer), play)
    assert [one.phase for one in found] == [PREFILL, DECODE, RETRY, PREFILL, DECODE]
    assert "reset" in found[1].outcome
    assert found[2].name == found[1].outcome


def test_siblings_that_are_cancelled_leave_no_open_request() -> None:
    gate = asyncio.Event()

    async def play(client: GenerationClient) -> list[Interval]:
        session = client.generate()
        asking = asyncio.ensure_future(session(PROMPT))
        await until(lambda: session.activity.open)
        asking.cancel()
        await until(lambda: asking.done() and not session.activity.open)
        return session.activity.closed

    (found,) = asked(FakeEngine(lambda _: [gate]), play)
    assert (found.phase, found.outcome) == (PREFILL, "cut off")


def test_time_inside_an_environment_is_not_the_agents() -> None:
    activity = Activity()
    activity.began, activity.ended = 0.0, 12.0
    activity.closed = [Interval(ENVIRONMENT, 0.0, 10.0, "shell.step"), Interval(TOOL, 2.0, 3.0, "ls")]
    agent = [(one.start, one.end) for one in activity.intervals(12.0) if one.phase == AGENT]
    assert agent == [(10.0, 12.0)]
