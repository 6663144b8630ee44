"""Answers that are cut short, and requests that a publish overtakes, against an engine that streams as SGLang does."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl import retries
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import EngineError
from asyncrl.observability.intervals import PREFILL
from asyncrl.schema import Completion, VersionSpan
from tests.engine.asking import PROMPT, asked, siblings
from tests.examples import examples
from tests.fakes import FakeEngine, Reply, completion, echo, jumping, pieces, stream, until

# --- answers that are cut short ------------------------------------------------------------------------------

ALPHABET = list(range(100, 108))  # what the policy writes: the token follows from the place
CUTS = (
    "abort",
    "end",
    "half an event",
    "reset",
    "refused connection",
    "503",
    "no engine",
    "overloaded",
    "stream error",
    "router's stream error",
)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)


def version_5(begun: int, tokens: int) -> list[VersionSpan]:
    return [VersionSpan(5, 0, tokens)] if tokens else []


def cut_at(
    cuts: list[tuple[str, int]], stop: int | None, spans: Callable[[int, int], list[VersionSpan]] = version_5
) -> FakeEngine:
    """An engine that writes 100, 101, ... and cuts its n-th answer short in the n-th way after so many more tokens.
    `spans` says which versions write so many tokens from a place on. An abort tells the versions, but hides that the
    last token was the last one."""

    def answer(request: dict[str, Any]) -> Reply:
        number = len(engine.requests) - 1
        begun = len(request["input_ids"]) - len(PROMPT)
        ids = ALPHABET[begun : begun + request["sampling_params"]["max_new_tokens"]]
        if stop is not None and stop in ids:
            ids = ids[: ids.index(stop) + 1]
        finish = "stop" if ids and ids[-1] == stop else "length"
        way, place = cuts[number] if number < len(cuts) else ("", 0)
        if way and place <= len(ids):
            ids, finish = ids[:place], "abort"
        events = pieces(Completion(ids, [-0.5 * i for i in ids], spans(begun, len(ids)), finish))
        if not way or finish != "abort":
            return stream(events)
        last, code = events[-1]["meta_info"], {"type": "abort", "message": "queue is full", "status_code": 503}
        error = {"error": {"message": "gone", "code": 503}}
        routers = {"error": {"message": "Stream error: unexpected EOF", "type": "stream_error"}}
        told: dict[str, Callable[[], Reply]] = {
            "abort": lambda: stream(events),
            "end": lambda: stream(silenced(events)).removesuffix(b"data: [DONE]\n\n"),
            "half an event": lambda: stream(silenced(events))[:-20] + b'data: {"output_ids": [1',
            "reset": lambda: [stream(silenced(events))[:-14], httpx.ReadError("reset by peer")],
            "refused connection": lambda: httpx.ConnectError("refused"),
            "503": lambda: httpx.Response(503, text="no available workers"),
            "no engine": lambda: httpx.Response(404, json={"error": {"code": "model_not_found"}}),
            "overloaded": lambda: last.update(finish_reason=code) or stream(events),
            "stream error": lambda: stream([*silenced(events), error]),
            "router's stream error": lambda: stream([*silenced(events), routers]),
        }
        return told[way]()

    engine = FakeEngine(answer)
    return engine


def silenced(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunk without what only the last one contains; empty if nothing was generated yet."""
    for name in ("weight_versions", "finish_reason"):
        events[-1]["meta_info"].pop(name)
    return [event for event in events if event["output_ids"]]


@given(
    st.lists(st.tuples(st.sampled_from(CUTS), st.integers(0, 5)), max_size=6),
    st.sampled_from([None, *ALPHABET]),
    st.integers(1, len(ALPHABET)),
)
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_answer_goes_on_from_its_last_token(cuts, stop, limit) -> None:
    engine = cut_at(cuts, stop)
    settings = {"max_new_tokens": limit, "stop_token_ids": [] if stop is None else [stop], "retry_timeout": 5.0}
    seen: list[GenerationSession] = []

    async def play(client: GenerationClient) -> Completion:
        client.inflight.release(3)
        seen.append(client.generate())
        return await seen[0](PROMPT)

    found = asked(engine, play, **settings)
    (whole,) = asked(cut_at([], stop), siblings, **settings)
    assert (found.token_ids, found.logprobs, found.finish_reason) == (
        whole.token_ids,
        whole.logprobs,
        whole.finish_reason,
    )
    assert seen[0].received == len(found.token_ids)
    for span in found.versions:  # what no engine could tell is as old as it can be
        assert (span.version, span.inferred) in ((5, False), (3, True))
    assert all(request["sampling_params"]["max_new_tokens"] > 0 for request in engine.requests)  # none for nothing
    for request, later in pairwise(engine.requests):
        assert later["input_ids"][: len(request["input_ids"])] == request["input_ids"]
        assert later["rid"] != request["rid"]


@given(
    st.lists(st.tuples(st.sampled_from(CUTS), st.integers(0, 5)), max_size=6),
    st.lists(st.integers(0, 2), min_size=10, max_size=10),
)
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_versions_ascend_and_are_never_younger_than_writers(cuts, publishes: list[int]) -> None:
    """I4, whatever is cut and published meanwhile: exact where an engine told, and otherwise a lower bound."""
    coming = iter(publishes)
    wrote: list[int] = []
    made: list[GenerationClient] = []

    def spans(begun: int, tokens: int) -> list[VersionSpan]:
        inflight = made[0].inflight
        before, after = inflight.version, inflight.version + next(coming, 0)
        half = tokens // 2
        wrote[begun:] = [before] * half + [after] * (tokens - half)
        inflight.release(after)
        told = [VersionSpan(before, 0, half), VersionSpan(after, half, tokens)]
        return [span for span in told if span.start < span.end]

    async def play(client: GenerationClient) -> Completion:
        made.append(client)
        return await client.generate()(PROMPT)

    found = asked(cut_at(cuts, None, spans), play, retry_timeout=5.0)
    assert [span.version for span in found.versions] == sorted(span.version for span in found.versions)
    for span in found.versions:
        for place in range(span.start, span.end):
            assert span.version <= wrote[place] if span.inferred else span.version == wrote[place]


def test_tokens_of_a_broken_stream_take_the_version_asked_for() -> None:
    engine = cut_at([("reset", 2), ("abort", 2), ("end", 1)], None)

    async def play(client: GenerationClient) -> Completion:
        client.inflight.release(3)
        return await client.generate()(PROMPT)

    found = asked(engine, play)
    assert found.versions == [
        VersionSpan(3, 0, 2, True),
        VersionSpan(5, 2, 4),
        VersionSpan(3, 4, 5, True),
        VersionSpan(5, 5, 8),
    ]


def test_each_sibling_goes_on_by_itself() -> None:
    def answer(request: dict[str, Any]) -> bytes:
        if len(engine.requests) == 1:
            cut = Completion([100], [-1.0], [VersionSpan(0, 0, 1)], "abort")
            return stream([*pieces(cut, 0), *pieces(completion(tokens=2), 1)])
        return stream(pieces(Completion([101], [-2.0], [VersionSpan(1, 0, 1)], "stop")))

    engine = FakeEngine(answer)
    first, second = asked(engine, lambda client: siblings(client, 2))
    assert (first.token_ids, first.versions) == ([100, 101], [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)])
    assert second == completion(tokens=2)
    assert [len(request["input_ids"]) for request in engine.requests] == [len(PROMPT), len(PROMPT) + 1]


def test_lone_sibling_is_asked_once_while_others_are_awaited() -> None:
    """The request of the siblings ends after its continuation began, whose end it is not."""
    continued = asyncio.Event()

    def answer(request: dict[str, Any]) -> Reply:
        if request["sampling_params"]["n"] == 1:
            rest = Completion([9], [-0.5], [VersionSpan(1, 0, 1)], "length")
            return [going_on, stream(pieces(rest))]
        cut = Completion([7, 8], [-0.5] * 2, [VersionSpan(0, 0, 2)], "abort")
        whole = Completion([1, 2], [-0.5] * 2, [VersionSpan(0, 0, 2)], "stop")
        first, *last = (
            stream([event]).removesuffix(b"data: [DONE]\n\n") for event in (*pieces(cut), *pieces(whole, 1))
        )
        return [first, continued, *last, b"data: [DONE]\n\n"]

    going_on = asyncio.Event()
    engine = FakeEngine(answer)

    async def play(client: GenerationClient) -> list[Completion]:
        asking = asyncio.ensure_future(siblings(client, 2))
        await until(lambda: len(engine.requests) == 2)
        continued.set()
        await until(lambda: len(client.inflight._sent) == 1)
        going_on.set()
        return await asking

    cut, whole = asked(engine, play, retry_timeout=5.0)
    assert [request["sampling_params"]["n"] for request in engine.requests] == [2, 1]
    assert (cut.token_ids, whole.token_ids) == ([7, 8, 9], [1, 2])
    assert cut.versions == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)]


NEVER: dict[str, tuple[Reply, str]] = {
    "aborted": (stream(pieces(Completion([], [], [], "abort"))), "the last one failed: aborted"),
    "cut": (b"", "the last one failed: the stream ended without its last event"),
    "unreachable": (httpx.ConnectError("refused"), "the last one failed: ConnectError refused"),
    "silent": (httpx.ReadTimeout("600 s"), "the last one failed: ReadTimeout 600 s"),
    "no engines": (httpx.Response(503, text="no workers"), "the last one failed: the router answered 503: no workers"),
    "no JSON": (b"data: {oops\n\n", "the last one failed: the stream of an engine has an invalid event: .*JSON"),
}


@pytest.mark.parametrize("way", NEVER)
def test_missing_answer_is_an_error_with_time_and_attempts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)
    reply, reason = NEVER[way]
    engine = FakeEngine(lambda _: reply)

    async def play(client: GenerationClient) -> list[Any]:
        generate = client.generate()
        return await asyncio.gather(*(generate(PROMPT) for _ in range(2)), return_exceptions=True)

    found = asked(engine, play, run=jumping)
    assert [type(one) for one in found] == [EngineError, EngineError]
    assert re.search(f"generation failed: no token arrived for \\d s in .* attempts; {reason}", str(found[0]))
    assert len(engine.requests) > 2


def test_attempts_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)
    engine = FakeEngine(lambda _: httpx.Response(503))
    with pytest.raises(EngineError):
        asked(engine, siblings, retry_timeout=0.3, run=jumping)
    assert 4 <= len(engine.requests) <= 9  # at 0, 0, 10, 30, 70, 150, 310 ms, shortened by up to a half each


def test_refused_request_is_not_asked_again() -> None:
    refused = [httpx.Response(400, text="bad"), httpx.Response(401), httpx.Response(404, text="no such route")]
    for reply in (*refused, stream([{"error": {"message": "bad"}}])):
        engine = FakeEngine(lambda _, reply=reply: reply)
        with pytest.raises(EngineError):
            asked(engine, siblings, retry_timeout=5.0)
        assert len(engine.requests) == 1


def test_requests_of_a_group_carry_one_routing_key() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        for group in ("g1", "g2"):
            one, other = client.generate(group=group), client.generate(group=group)
            await asyncio.gather(one(PROMPT), other(PROMPT))
            await asyncio.gather(one([*PROMPT, 1]), other([*PROMPT, 2]))
        await asyncio.gather(*(client.generate()([1, i]) for i in range(3)))

    asked(engine, play)
    assert engine.routes[:6] == ["g1"] * 3 + ["g2"] * 3
    assert len(set(engine.routes[6:])) == 3


# --- requests and a publish ----------------------------------------------------------------------------------


def across_a_publish(
    first: Callable[[asyncio.Event], Reply], group: str = "g", **settings: Any
) -> tuple[FakeEngine, Completion, GenerationClient]:
    """A request is in flight while version 8 is published; its engine goes on after that."""
    made: list[GenerationClient] = []

    async def play(client: GenerationClient) -> Completion:
        made.append(client)
        client.inflight.release(7)
        asking = asyncio.create_task(client.generate(group=group)(PROMPT))
        await until(lambda: engine.requests)
        for _ in range(20):
            await asyncio.sleep(0)
        client.inflight.hold()
        assert not await client.inflight.drained(0.0)
        client.inflight.release(8)
        for _ in range(20):
            await asyncio.sleep(0)
        gate.set()
        found = await asking
        assert await client.inflight.drained(30.0)
        return found

    gate = asyncio.Event()
    engine = FakeEngine(lambda request: first(gate) if len(engine.requests) == 1 else echo()(request))
    return engine, asked(engine, play, **settings), made[0]


def started_late(gate: asyncio.Event) -> Reply:
    return [gate, stream(pieces(completion(tokens=4, versions=(7, 8))))]


def test_overtaken_request_is_asked_anew_under_the_new_key() -> None:
    engine, found, client = across_a_publish(started_late)
    assert [request["extra_key"] for request in engine.requests] == ["run0-v7", "run0-v8"]
    assert found.versions == [VersionSpan(8, 0, 3)]
    assert client.inflight.figures.continued == Counter(overtaken=1)


def test_request_that_two_publishes_overtake_is_asked_anew_once() -> None:
    """The second comes before the first has ended it."""
    seen: list[GenerationSession] = []

    async def play(client: GenerationClient) -> Completion:
        seen.append(client.generate(group="g"))
        asking = asyncio.create_task(seen[0](PROMPT))
        await until(lambda: engine.requests)
        for version in (8, 9):
            client.inflight.hold()
            client.inflight.release(version)
            await asyncio.sleep(0)
        return await asking

    engine = FakeEngine(lambda request: [asyncio.Event()] if len(engine.requests) == 1 else echo()(request))
    found = asked(engine, play)
    assert [request["extra_key"] for request in engine.requests] == ["run0-v0", "run0-v9"]
    assert found.versions == [VersionSpan(9, 0, 3)]
    assert [one.outcome for one in seen[0].activity.closed if one.phase == PREFILL] == ["overtaken", ""]


def test_whole_sibling_of_an_overtaken_request_is_kept() -> None:
    going_on = asyncio.Event()

    def begun(request: dict[str, Any]) -> Reply:
        if request["sampling_params"]["n"] == 1:
            return echo()(request)
        whole = stream(pieces(completion(tokens=2, versions=(7,)))).removesuffix(b"data: [DONE]\n\n")
        return [going_on, whole, asyncio.Event()]

    engine = FakeEngine(begun)

    async def play(client: GenerationClient) -> list[Completion]:
        client.inflight.release(7)
        first, second = (asyncio.ensure_future(client.generate(group="g")(PROMPT)) for _ in range(2))
        await until(lambda: engine.requests)
        client.inflight.hold()  # before its first piece
        going_on.set()
        await first
        client.inflight.release(8)
        return [await first, await second]

    first, second = asked(engine, play)
    assert [request["sampling_params"]["n"] for request in engine.requests] == [2, 1]
    assert [answer.versions[0].version for answer in (first, second)] == [7, 8]


def test_repeated_hold_counts_what_a_publish_retracts_once() -> None:
    gate = asyncio.Event()

    async def play(client: GenerationClient) -> int:
        client.inflight.release(7)
        asking = asyncio.create_task(client.generate(group="g-v7")(PROMPT))
        await until(lambda: engine.requests)
        for _ in range(2):  # a hold is repeated until it is confirmed
            client.inflight.hold()
        client.inflight.release(8)
        gate.set()
        await asking
        return client.inflight.figures.refilled_tokens

    engine = FakeEngine(lambda request: [gate, echo()(request)])
    assert asked(engine, play, pause_mode="retract", cache_key="group") == len(PROMPT)


def test_request_that_had_begun_keeps_its_tokens() -> None:
    answer = completion(tokens=4, versions=(7, 8))

    def begun(gate: asyncio.Event) -> Reply:
        first, rest = pieces(answer)
        return [stream([first]).removesuffix(b"data: [DONE]\n\n"), gate, stream([rest])]

    engine, found, _ = across_a_publish(begun)
    assert found == answer
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"pause_mode": "retract"}, "v7"), ({"pause_mode": "abort"}, "v7"), ({"cache_key": "group"}, "g")],
)
def test_flushed_or_shared_caches_ask_nothing_anew(settings: dict[str, Any], key: str) -> None:
    engine, found, _ = across_a_publish(started_late, **settings)
    assert found == completion(tokens=4, versions=(7, 8))
    assert [request["extra_key"] for request in engine.requests] == [f"run0-{key}"]
