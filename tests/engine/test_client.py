"""The client against an engine that streams as SGLang does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.client import RECENT, GenerationClient, SiblingSpread
from asyncrl.engine.stop_strings import StopStrings
from asyncrl.errors import EngineError, PromptRefused
from asyncrl.observability.intervals import AGENT, DECODE, PREFILL, PUBLISH, QUEUED
from asyncrl.schema import Completion, Exchange, VersionSpan
from tests.engine.asking import PROMPT, asked, siblings
from tests.engine.resuming import resumed
from tests.examples import examples
from tests.fakes import FakeEngine, FakeHttp, completion, echo, pieces, stream, until

completions = st.builds(
    lambda ids, cut, finish: Completion(
        ids,
        [-0.125 * i - 1e-9 for i in range(len(ids))],
        [VersionSpan(3, 0, cut % len(ids)), VersionSpan(4, cut % len(ids), len(ids))]
        if cut % len(ids)
        else [VersionSpan(3, 0, len(ids))],
        finish,
    ),
    st.lists(st.integers(0, 10**5), min_size=1, max_size=9),
    st.integers(0, 8),
    st.sampled_from(["stop", "length"]),
)


@given(st.lists(completions, min_size=1, max_size=4), st.integers(1, 4), st.randoms(), st.integers(1, 60))
@settings(max_examples=examples(60))
def test_answers_arrive_as_sent_wherever_the_bytes_are_cut(answers, size, random, longest) -> None:
    queues = [pieces(answer, index, size) for index, answer in enumerate(answers)]
    events = []
    while any(queues):  # samples interleave, each in its own order
        events.append(random.choice([queue for queue in queues if queue]).pop(0))
    data = stream(events)
    chunks = []
    while data:
        cut = random.randint(1, longest)
        chunks.append(data[:cut])
        data = data[cut:]
    engine = FakeEngine(lambda _: chunks)
    assert asked(engine, lambda client: siblings(client, len(answers))) == answers


def test_answers_are_bounded_by_the_engines_real_cache() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> list[Completion]:
        client.narrow(len(PROMPT) + 7)  # the smallest with room for a prompt
        client.narrow(1000)  # of an engine with more
        return await siblings(client)

    asked(engine, play, context=4096)
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 5


@pytest.mark.parametrize("token", [-1, 20, 1_000_000])
def test_a_token_that_the_model_does_not_have_reaches_no_engine(token: int) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        with pytest.raises(PromptRefused, match=f"has token {token}, but the model's vocabulary has 20 tokens"):
            await siblings(client, token_ids=[*PROMPT, token])
        await siblings(client, token_ids=[*PROMPT, 19])

    asked(engine, play, vocabulary=20)
    assert [request["input_ids"] for request in engine.requests] == [[*PROMPT, 19]]


def test_siblings_become_one_request_of_n_samples() -> None:
    engine = FakeEngine(echo())
    first, second, third = asked(engine, lambda client: siblings(client, 3))
    (request,) = engine.requests
    assert request["input_ids"] == PROMPT
    assert request["sampling_params"]["n"] == 3
    assert [answer.token_ids[0] for answer in (first, second, third)] == [0, 1, 2]
    assert engine.keys == ["Bearer key0"]
    assert request["return_logprob"] is request["stream"] is True


def test_seeded_samples_are_requests_drawn_alike_in_every_run() -> None:
    def seeds(run_seed: int, *samples: str) -> list[int]:
        engine = FakeEngine(echo())

        async def play(client: GenerationClient) -> None:
            sessions = [client.generate(group="g", sample=sample) for sample in samples]
            sessions.append(client.generate(group="g", sample=samples[0], purpose="evaluation"))
            await asyncio.gather(*(session(PROMPT) for session in sessions))

        asked(engine, play, seed=run_seed)
        assert {request["sampling_params"]["n"] for request in engine.requests} == {1}
        return sorted(request["sampling_params"]["sampling_seed"] for request in engine.requests)

    found = seeds(0, "g 0", "g 1")
    assert len(set(found)) == 3
    assert all(0 <= seed < 2**63 for seed in found)
    assert seeds(0, "g 1", "g 0")[:1] != seeds(1, "g 1", "g 0")[:1]
    assert set(seeds(0, "g 0", "g 2")) & set(found)
    plain = FakeEngine(echo())
    asked(plain, lambda client: siblings(client, 2))
    assert "sampling_seed" not in plain.requests[0]["sampling_params"]


def test_other_prompts_and_temperatures_are_other_requests() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        asks = [client.generate(t)(ids) for ids in (PROMPT, [12, 2, 11]) for t in (None, 0.5, 0.0, 0.0)]
        await asyncio.gather(*asks)

    asked(engine, play)
    sent = sorted((r["input_ids"][1], r["sampling_params"]["temperature"]) for r in engine.requests)
    assert sent == [(p, t) for p in (1, 2) for t in (0.0, 0.0, 0.5, 1.0)]
    assert all(request["sampling_params"]["n"] == 1 for request in engine.requests)


def test_siblings_with_other_limits_are_requests_of_their_own() -> None:
    """A shared request has one limit, so that a sibling would get the first one's."""
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        generate = client.generate(group="g")
        await asyncio.gather(*(generate(PROMPT, max_new_tokens=most) for most in (5, 7, 5, None)))

    asked(engine, play)
    sent = [
        (request["sampling_params"]["max_new_tokens"], request["sampling_params"]["n"]) for request in engine.requests
    ]
    assert sorted(sent) == [(5, 2), (7, 1), (8, 1)]


@pytest.mark.parametrize(
    ("seed", "finish", "sent"),
    [(None, "stop", []), (None, "", [[*PROMPT, 7, 8]]), (0, "stop", [PROMPT]), (0, "", [PROMPT])],
)
def test_answers_of_a_saved_run_are_kept_but_redrawn_if_seeded(
    seed: int | None, finish: str, sent: list[list[int]]
) -> None:
    """The last bits of an engine's numbers depend on whether it prefills a token or generates it, so a deterministic
    run draws each answer from its first token, as it did before it was saved."""
    engine = FakeEngine(echo())
    saved = Exchange(PROMPT, Completion([7, 8], [-0.1, -0.2], [VersionSpan(0, 0, 2)], finish))

    async def play(client: GenerationClient) -> Completion:
        return await resumed(client, "g", "g 0", 0, 2, [saved])(PROMPT)

    answer = asked(engine, play, seed=seed)
    assert [request["input_ids"] for request in engine.requests] == sent
    assert answer.token_ids[:2] == ([7, 8] if seed is None else [0, 1])


def test_without_coalescing_every_sibling_is_a_request() -> None:
    engine = FakeEngine(echo())
    asked(engine, lambda client: siblings(client, 3), coalesce=False)
    assert [request["sampling_params"]["n"] for request in engine.requests] == [1, 1, 1]


def test_siblings_spread_by_the_mean_of_recent_answers() -> None:
    spread = SiblingSpread("auto")
    assert not spread(10)  # nothing is known
    for tokens in (20, 60):
        spread.finished(tokens)
    assert [spread(prompt) for prompt in (10, 11)] == [True, False]  # up to a quarter of 40
    for _ in range(10 * RECENT):
        spread.finished(80)
    assert [spread(prompt) for prompt in (19, 21)] == [True, False]


def test_siblings_spread_once_answers_are_long_and_then_stay() -> None:
    engine = FakeEngine(echo(tokens=24))

    async def play(client: GenerationClient) -> None:
        for turns in (1, 2):
            sessions = [client.generate(group=f"g{turns}", sample=f"g{turns} {number}") for number in range(2)]
            for _ in range(turns):
                await asyncio.gather(*(session(PROMPT) for session in sessions))
            await asyncio.gather(*(session([9] * 100) for session in sessions))  # of a long context

    asked(engine, play, spread="auto", max_new_tokens=24)
    assert [request["sampling_params"]["n"] for request in engine.requests] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert engine.routes == ["g1", "g1", *["g2 0", "g2 1"] * 3]


@pytest.mark.parametrize(("spread", "routes"), [(True, ["g 0", "g 1"]), (False, ["g"])])
def test_siblings_are_spread_or_not_as_configured(spread: bool, routes: list[str]) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        await asyncio.gather(*(client.generate(group="g", sample=f"g {number}")(PROMPT) for number in range(2)))

    asked(engine, play, spread=spread)
    assert engine.routes == routes


def test_turn_after_turn_asks_anew() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        await siblings(client)
        await siblings(client)

    asked(engine, play)
    assert len(engine.requests) == 2


def test_held_requests_wait_and_carry_the_released_version() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> list[Completion]:
        await siblings(client)
        client.inflight.hold()
        asking = asyncio.create_task(siblings(client, 2))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.requests) == 1
        assert not asking.done()
        client.inflight.release(7)
        return await asking

    answers = asked(engine, play)
    assert [request["extra_key"] for request in engine.requests] == ["run0-v0", "run0-v7"]
    assert {answer.versions[0].version for answer in answers} == {7}


def test_requests_of_a_group_go_to_one_replica() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        for _ in range(2):
            for group in range(40):
                await client.generate(group=f"g{group}")(PROMPT)

    asked(engine, play, replicas=4)
    chosen = [request["routed_dp_rank"] for request in engine.requests]
    assert chosen[:40] == chosen[40:]
    assert set(chosen) == {0, 1, 2, 3}
    asked(alone := FakeEngine(echo()), play)
    assert not any("routed_dp_rank" in request for request in alone.requests)


def test_spread_siblings_go_to_all_replicas_and_stay() -> None:
    """Even with two replicas and few siblings, whose names differ in one digit."""
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        for group in range(40):
            sessions = [client.generate(group=f"g{group}", sample=f"g{group} {number}") for number in range(4)]
            for _ in range(2):
                for session in sessions:
                    await session(PROMPT)

    asked(engine, play, replicas=2, spread=True)
    chosen = [request["routed_dp_rank"] for request in engine.requests]
    turns = list(zip(*[iter(chosen)] * 4, strict=True))
    assert turns[::2] == turns[1::2]
    assert 60 < sum(chosen) / 2 < 100
    assert sum(len(set(replicas)) == 2 for replicas in turns[::2]) > 30


def test_request_in_flight_stays_open_while_new_ones_are_held() -> None:
    gate = asyncio.Event()
    answer = completion(tokens=4, versions=(0, 1))

    async def play(client: GenerationClient) -> list[Completion]:
        asking = asyncio.create_task(siblings(client))
        await until(lambda: engine.requests)
        client.inflight.hold()
        gate.set()
        return await asking

    engine = FakeEngine(lambda _: stream(pieces(answer)))
    handle = engine.handle

    async def late(request: httpx.Request) -> httpx.Response:
        response = await handle(request)
        await gate.wait()
        return response

    assert asked(engine, play, http=FakeHttp(late)) == [answer]


def test_no_request_id_is_a_prefix_of_another() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        await asyncio.gather(*(client.generate()([12, i, 11]) for i in range(120)))

    asked(engine, play)
    rids = [request["rid"] for request in engine.requests]
    assert len(set(rids)) == 120
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]


def broken(change: Callable[[list[dict[str, Any]]], Any]) -> FakeEngine:
    """An engine whose good answer of four tokens is changed before it is sent."""

    def answer(_: dict[str, Any]) -> bytes | list[bytes] | httpx.Response:
        events = pieces(completion(tokens=4))
        changed = change(events)
        return changed if changed is not None else stream(events)

    return FakeEngine(answer)


def spans(*bounds: tuple[int, int]) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: events[-1]["meta_info"].update(
        weight_versions=[{"version": "0", "start": start, "end": end} for start, end in bounds]
    )


FAULTS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "refused by the engine": (
        lambda e: e[-1]["meta_info"].update(finish_reason={"type": "abort", "message": "too long", "status_code": 400}),
        r"ended a request with 'abort' \(too long\)",
    ),
    "old SGLang": (lambda events: events[-1]["meta_info"].pop("weight_versions") and None, "no weight_versions"),
    "spans end early": (spans((0, 3)), "do not cover 4 tokens"),
    "spans end late": (spans((0, 5)), "do not cover 4 tokens"),
    "spans with a gap": (spans((0, 1), (2, 4)), "do not partition 4 tokens"),
    "spans overlap": (spans((0, 3), (2, 4)), "do not partition 4 tokens"),
    "version is no number": (
        lambda events: events[-1]["meta_info"]["weight_versions"][0].update(version="default"),
        "no weights of this run",
    ),
    "logprob missing": (lambda events: events[0]["meta_info"]["output_token_logprobs"].pop() and None, "4 token ids"),
    "logprob null": (
        lambda e: e[0]["meta_info"].update(output_token_logprobs=[[None, 0, None], [-0.5, 1, None]]),
        "4 token ids with 3 log-probabilities",
    ),
    "error in the stream": (
        lambda events: stream([events[0], {"error": {"message": "out of memory"}}]),
        "failed a request: .*out of memory",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_answer_that_is_not_whole_is_an_engine_error(fault: str) -> None:
    change, reason = FAULTS[fault]
    with pytest.raises(EngineError, match=reason):
        asked(broken(change), siblings)


def test_unasked_sample_is_an_engine_error_not_a_hang() -> None:
    engine = FakeEngine(lambda _: stream([*pieces(completion(), 0), *pieces(completion(), 1)]))
    with pytest.raises(EngineError):
        asked(engine, siblings)


def test_cancelled_sibling_leaves_the_others_their_answers() -> None:
    async def play(client: GenerationClient) -> Completion:
        first, second = (asyncio.ensure_future(client.generate()(PROMPT)) for _ in range(2))
        await until(lambda: engine.requests)
        first.cancel()
        return await second

    engine = FakeEngine(echo())
    assert asked(engine, play).token_ids == [1, 2, 3]


def test_sibling_has_its_answer_as_soon_as_that_is_whole() -> None:
    """The sibling requests its next turn while the longest of them is still being generated."""
    long_one = asyncio.Event()

    def answer(request: dict[str, Any]) -> list[bytes | asyncio.Event]:
        short, long = pieces(completion(tokens=2)), pieces(completion(tokens=4), 1)
        if request["sampling_params"]["n"] == 1:
            return [stream(short)]
        return [stream([*short, long[0]]).removesuffix(b"data: [DONE]\n\n"), long_one, stream(long[1:])]

    engine = FakeEngine(answer)

    async def play(client: GenerationClient) -> None:
        first, second = client.generate(group="g0"), client.generate(group="g0")
        ahead, behind = (asyncio.ensure_future(session(PROMPT)) for session in (first, second))
        written = (await ahead).token_ids
        await first([*PROMPT, *written, 12])
        assert not behind.done()
        assert len(client.inflight._sent) == 1
        long_one.set()
        assert (await behind).token_ids == [0, 1, 2, 3]
        figures = client.inflight.take_figures()
        assert (figures.requests, figures.prompt_tokens) == (2, 12)

    asked(engine, play)


def spelled(token_ids: Sequence[int]) -> str:
    return "".join("abcdefgh"[token] for token in token_ids)


@pytest.mark.parametrize(("text", "kept"), [("cd", 4), ("bc", 3), ("c", 3), ("a", 1)])
@pytest.mark.parametrize("ending", ["abort", "broken", "refused"])
@pytest.mark.parametrize("of", ["run", "request"])
def test_answer_ends_with_the_token_that_completes_a_stop_string(text: str, kept: int, ending: str, of: str) -> None:
    """The engine is told to abort it, and what it sends until then is counted but not kept. Versions are those that its
    last chunk tells, unless the stream breaks."""
    versions, aborted = [VersionSpan(3, 0, 3), VersionSpan(4, 3, 6)], asyncio.Event()
    *first, last = pieces(Completion([0, 1, 2, 3, 4, 5], [-0.5 * i for i in range(6)], versions, "abort"), size=2)
    tokens = last["output_ids"]

    async def answer() -> AsyncIterator[bytes]:
        for event in first:
            yield stream([event]).removesuffix(b"data: [DONE]\n\n")
        if ending != "refused":
            await aborted.wait()
        if ending == "broken":
            raise httpx.ReadError("reset")
        if ending == "refused":
            last["meta_info"]["finish_reason"] = {"type": "length"}
        yield stream([{**last, "output_ids": tokens}])

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_request":
            assert (request.url.host, request.headers["authorization"]) == ("engine", "Bearer key0")
            aborted.set()
            return httpx.Response(500 if ending == "refused" else 200)
        return httpx.Response(200, content=answer(), headers={"x-smg-routed-worker-id": "http://engine:1"})

    of_run, of_request = ([text], []) if of == "run" else ([], [text])

    async def play(client: GenerationClient) -> None:
        found = await client.generate()(PROMPT, stop=of_request)
        spans = [VersionSpan(3, 0, min(3, kept))] + ([VersionSpan(4, 3, 4)] if kept == 4 else [])
        if ending == "broken":
            spans = [VersionSpan(0, 0, kept, inferred=True)]
        logprobs = [-0.5 * i for i in range(kept)]
        assert found == Completion(list(range(kept)), logprobs, spans, "stop")
        assert client.inflight.tokens["training"] == (4 if ending == "broken" else 6)
        assert aborted.is_set()

    settings = {"stop": StopStrings(of_run, spelled), "http": FakeHttp(handle), "stop_token_ids": [7]}
    asked(FakeEngine(echo()), play, **settings)


def test_siblings_with_stop_strings_share_no_request() -> None:
    """Each is aborted by itself."""
    engine = FakeEngine(lambda _: stream(pieces(Completion([0, 1, 2], [-0.1] * 3, [VersionSpan(0, 0, 3)], "length"))))

    async def play(client: GenerationClient) -> list[Completion]:
        sessions = [client.generate(group="g0") for _ in range(3)]
        stops = (["b"], ["c"], [])
        return await asyncio.gather(*(one(PROMPT, stop=stop) for one, stop in zip(sessions, stops, strict=True)))

    answers = asked(engine, play, stop=StopStrings([], spelled))
    assert [(one.token_ids, one.finish_reason) for one in answers] == [
        ([0, 1], "stop"),
        ([0, 1, 2], "stop"),
        ([0, 1, 2], "length"),
    ]
    assert [request["sampling_params"]["n"] for request in engine.requests] == [1, 1, 1]


@pytest.mark.parametrize("of", ["run", "request"])
def test_stop_string_may_begin_before_an_answer_is_interrupted(of: str) -> None:
    """Also before the run was resumed, and at its very end."""
    of_run, of_request = (["bc"], []) if of == "run" else ([], ["bc"])
    requests: list[list[int]] = []

    def answer(request: dict[str, Any]) -> bytes | list[bytes | Exception]:
        requests.append(request["input_ids"])
        if len(request["input_ids"]) == len(PROMPT):
            whole = stream(pieces(Completion([0, 1, 2], [-0.1] * 3, [VersionSpan(0, 0, 3)], "length"), size=1)[:2])
            return [whole.removesuffix(b"data: [DONE]\n\n"), httpx.ReadError("reset")]
        return stream(pieces(Completion([2, 3, 4], [-0.2] * 3, [VersionSpan(0, 0, 3)], "length"), size=3))

    async def play(client: GenerationClient) -> None:
        found = await client.generate()(PROMPT, stop=of_request)
        assert (found.token_ids, found.finish_reason) == ([0, 1, 2], "stop")
        half = Exchange(PROMPT, Completion([0, 1, 2], [-0.1] * 3, [VersionSpan(0, 0, 3)], ""))
        again = await resumed(client, "g", "g 0", 0, 3, [half])(PROMPT, stop=of_request)
        assert (again.token_ids, again.finish_reason) == ([0, 1, 2], "stop")

    asked(FakeEngine(answer), play, stop=StopStrings(of_run, spelled), retry_timeout=5.0)
    assert requests == [PROMPT, [*PROMPT, 0, 1]]


def test_request_that_nobody_waits_for_is_closed() -> None:
    closed: list[bool] = []

    async def endless(_: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                yield stream(pieces(completion(tokens=8))[:1]).removesuffix(b"data: [DONE]\n\n")
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        return httpx.Response(200, content=body())

    async def play(client: GenerationClient) -> None:
        asking = asyncio.create_task(siblings(client, 2))
        for _ in range(100):
            await asyncio.sleep(0)
        asking.cancel()
        await until(lambda: closed)

    asked(FakeEngine(echo()), play, http=FakeHttp(endless))


def test_closing_ends_open_requests_before_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def play(client: GenerationClient) -> None:
        asking = [asyncio.create_task(client.generate(group=group)(PROMPT)) for group in ("g0", "g1")]
        await until(lambda: len(engine.requests) == 2)
        close = client._http.close

        async def closing() -> None:
            seen.append(len(client._tasks))
            await close()

        monkeypatch.setattr(client._http, "close", closing)
        await client.close()
        [task.cancel() for task in asking]

    engine = FakeEngine(lambda request: [asyncio.Event()])
    asked(engine, play)
    assert seen[0] == 0


def test_figures_count_requests_and_prompt_tokens_once_taken() -> None:
    async def play(client: GenerationClient) -> None:
        await siblings(client, 2)
        seen = client.inflight.take_figures()
        assert (seen.requests, seen.prompt_tokens, seen.cached_tokens) == (1, 8, 2)
        assert seen.seconds_busy > 0
        assert client.inflight.take_figures().requests == 0

    asked(FakeEngine(echo()), play)


def streamed_in_two(going_on: asyncio.Event) -> Callable[[dict[str, Any]], list[bytes | asyncio.Event]]:
    """Each sample's first two tokens at once, its other two when the event says so."""

    def answer(request: dict[str, Any]) -> list[bytes | asyncio.Event]:
        samples = [pieces(completion(tokens=4), index) for index in range(request["sampling_params"]["n"])]
        first = stream(sample[0] for sample in samples).removesuffix(b"data: [DONE]\n\n")
        return [first, going_on, stream(sample[1] for sample in samples)]

    return answer


def test_tokens_of_a_closed_session_are_counted_too() -> None:
    going_on = asyncio.Event()

    async def play(client: GenerationClient) -> None:
        sessions = [client.generate(group="g0") for _ in range(2)]
        first, second = (asyncio.ensure_future(session(PROMPT)) for session in sessions)
        await until(lambda: sessions[1].received == 2)
        first.cancel()
        assert sessions[0].close() == 2
        going_on.set()
        await second
        assert [session.received for session in sessions] == [2, 4]
        assert (client.inflight.tokens["training"], client.inflight.late_tokens) == (8, 2)
        await client.generate(0.0, purpose="evaluation")(PROMPT)
        assert client.inflight.tokens == {"training": 8, "evaluation": 4}

    asked(FakeEngine(streamed_in_two(going_on)), play)


def test_session_says_which_publish_or_piece_it_waits_for() -> None:
    going_on = asyncio.Event()

    async def play(client: GenerationClient) -> None:
        client.inflight.hold()
        session = client.generate()
        asking = asyncio.ensure_future(session(PROMPT))
        await until(lambda: session.activity.waits_for == "the end of a publish")
        client.inflight.release(1)
        await until(lambda: session.activity.waits_for == "the next chunk of an engine")
        going_on.set()
        await asking
        assert session.activity.waits_for == "its agent"
        intervals = (one for one in session.activity.intervals(time.time()) if one.phase != AGENT)
        found = [(one.phase, one.name, one.version) for one in intervals]
        assert found[:3] == [(QUEUED, PUBLISH, -1), (PREFILL, "", -1), (DECODE, "", 0)]

    asked(FakeEngine(streamed_in_two(going_on)), play)


def test_what_must_be_prefilled_is_what_no_cache_can_hold() -> None:
    """A prompt once, and its last token for each sibling; of a later turn what is new; all under another key."""
    engine = FakeEngine(echo(3))

    async def play(client: GenerationClient) -> list[int]:
        needed = []
        sessions = [client.generate(group="g1") for _ in range(4)]
        answers = await asyncio.gather(*[session(PROMPT) for session in sessions])
        needed.append(client.inflight.take_needed())
        later = [*PROMPT, *answers[0].token_ids, 5, 6]
        await sessions[0](later)
        needed.append(client.inflight.take_needed())
        client.inflight.hold()
        client.inflight.release(1)
        await sessions[0]([*later, 7])
        needed.append(client.inflight.take_needed())
        return [*needed, client.inflight.take_needed()]

    assert asked(engine, play) == [3 + 3, 2, 9, 0]
