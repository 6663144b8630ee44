"""Long answers move to an engine with far fewer requests, and lose nothing by it (rollout.migrate_after)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import retries
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.migration import LEAST_LEFT, Migration, moves
from asyncrl.errors import ConfigError
from asyncrl.network.addresses import Access
from asyncrl.schema import Completion, VersionSpan
from tests.engine.asking import PROMPT
from tests.fakes import FakeHttp, tiny_config

A, B = "http://a:1", "http://b:1"
LIMIT, AFTER = 40, 4


class Fleet:
    """Engines behind a router, both scripted. The token at place p of an answer is 100 + p, with log-probability -p. An
    engine writes when it is told to; its versions begin at the place of their first token."""

    def __init__(self, *urls: str) -> None:
        self.version = 0
        self.urls, self.dead = list(urls), set[str]()
        self.keys: dict[str, str] = {}
        self.open: dict[str, tuple[str, asyncio.Queue[Any]]] = {}
        self.others: Counter[str] = Counter()  # requests of somebody else
        self.asked: list[str] = []  # engine of each request
        self.aborts: list[str] = []
        self.slow_aborts: list[asyncio.Queue[Any]] | None = None  # those that an engine has yet to carry out
        self.refuses_aborts: int | Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None  # when the router is asked
        self.client = GenerationClient(
            "http://router",
            run="run0",
            access=Access("key0"),
            max_new_tokens=LIMIT,
            temperature=1.0,
            stop_token_ids=[],
            timeout=5.0,
            retry_timeout=5.0,
            coalesce=False,
            http=FakeHttp(self.generate),
        )
        self.migration = self.mover()

    def mover(self, **changes: Any) -> Migration:
        given: dict[str, Any] = {"after": AFTER, "below": 0.5, **changes}
        transport = httpx.MockTransport(self.control)
        return Migration("http://router", Access(""), self.client.inflight, transport=transport, **given)

    def loads(self) -> dict[str, int]:
        return {url: self.others[url] + sum(engine == url for engine, _ in self.open.values()) for url in self.urls}

    async def control(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            self.meanwhile()
            loads = self.loads().items()
            workers = [{"url": url, "load": load, "is_healthy": url not in self.dead} for url, load in loads]
            return httpx.Response(200, json={"workers": workers})
        assert request.url.path == "/abort_request"
        if isinstance(self.refuses_aborts, Exception):
            raise self.refuses_aborts
        if self.refuses_aborts:
            return httpx.Response(self.refuses_aborts)
        rid = json.loads(request.content)["rid"]
        self.aborts.append(rid)
        engine, orders = self.open[rid]
        assert str(request.url).startswith(engine)
        if self.slow_aborts is None:
            orders.put_nowait("abort")
        else:
            self.slow_aborts.append(orders)
        return httpx.Response(200)

    async def generate(self, request: httpx.Request) -> httpx.Response:
        body, key = json.loads(request.content), request.headers["x-smg-routing-key"]
        alive = [url for url in self.urls if url not in self.dead]
        if self.keys.get(key) not in alive:
            self.keys[key] = min(alive, key=lambda url: self.loads()[url])
        url, orders = self.keys[key], asyncio.Queue[Any]()
        self.asked.append(url)
        self.open[body["rid"]] = url, orders
        return httpx.Response(200, content=self.answer(body, orders), headers={"x-smg-routed-worker-id": url})

    async def answer(self, body: dict[str, Any], orders: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
        begun, limit = len(body["input_ids"]) - len(PROMPT), body["sampling_params"]["max_new_tokens"]
        assert body["input_ids"] == [*PROMPT, *range(100, 100 + begun)]
        assert begun + limit == LIMIT
        spans: list[dict[str, Any]] = []
        try:
            for place in range(begun, LIMIT):
                if isinstance(order := await orders.get(), Exception):
                    raise order
                made = place - begun
                ending = {"weight_versions": spans, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}
                if order == "abort":
                    yield event([], finish_reason={"type": "abort"}, completion_tokens=made, **ending)
                    return
                spans.append({"version": str(self.version), "start": made, "end": made + 1})
                last = {"finish_reason": {"type": "length"}, "completion_tokens": made + 1, **ending}
                yield event([place], **(last if place == LIMIT - 1 else {}))
        finally:
            del self.open[body["rid"]]

    async def write(self, tokens: int, url: str = "") -> None:
        """Let every request, or those at an engine, have so many tokens, and wait until the client has them."""
        for _ in range(tokens):
            for engine, orders in list(self.open.values()):
                if url in ("", engine):
                    orders.put_nowait("token")
            await settle()

    async def abort(self) -> None:
        """Carry out the aborts that were slow."""
        for orders in self.slow_aborts or []:
            orders.put_nowait("abort")
        await settle()

    async def die(self, url: str) -> None:
        self.dead.add(url)
        for engine, orders in list(self.open.values()):
            if engine == url:
                orders.put_nowait(httpx.ReadError("reset by peer"))
        await settle()


def event(places: list[int], **meta: Any) -> bytes:
    entries = [[-float(place), 100 + place, None] for place in places]
    found = {"output_ids": [100 + place for place in places], "meta_info": {"output_token_logprobs": entries, **meta}}
    return b"data: " + json.dumps(found).encode() + b"\n\n" + (b"data: [DONE]\n\n" if meta else b"")


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def played(play: Callable[[Fleet], Coroutine[Any, Any, Any]], *urls: str) -> Any:
    async def main() -> Any:
        fleet = Fleet(*urls or (A, B))
        try:
            return await asyncio.wait_for(play(fleet), 20.0)
        finally:
            await fleet.client.close()
            await fleet.migration.close()

    return asyncio.run(main())


async def two_at_one_engine(fleet: Fleet) -> list[asyncio.Task[Completion]]:
    """Two siblings at one engine, of which the first has AFTER tokens."""
    sessions = [fleet.client.generate(group="g", sample=f"g {number}") for number in range(2)]
    asking = [asyncio.create_task(sessions[0](PROMPT))]
    await settle()
    await fleet.write(AFTER)
    asking.append(asyncio.create_task(sessions[1](PROMPT)))
    await settle()
    assert fleet.asked == [fleet.asked[0]] * 2
    return asking


async def whole(fleet: Fleet, asking: list[asyncio.Task[Completion]]) -> list[Completion]:
    """Let the answers end, and check that they are as if nothing had happened."""
    while fleet.open:
        await fleet.write(1)
    found = await asyncio.gather(*asking)
    for one in found:
        assert one.token_ids == list(range(100, 100 + LIMIT))
        assert one.logprobs == [-float(place) for place in range(LIMIT)]
        assert one.finish_reason == "length"
        assert all(before.version <= after.version for before, after in pairwise(one.versions))
    assert fleet.client.inflight.tokens["training"] == LIMIT * len(found)  # none was received twice
    return found


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)


def test_the_longest_answer_moves_to_the_idle_engine_and_stays_there() -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        await fleet.migration.check()
        await settle()
        assert fleet.loads() == {A: 1, B: 1}
        assert fleet.aborts == ["run0-0000000000"]
        first, _ = await whole(fleet, asking)
        assert first.versions == [VersionSpan(0, 0, LIMIT)]  # told by the engines, not inferred
        assert fleet.client.inflight.figures.continued == Counter(moved=1)
        assert fleet.client.inflight.figures.inferred_tokens == 0

    played(play)


def test_the_next_turn_goes_to_the_engine_that_the_answer_moved_to() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.others[A] = 2
        session = fleet.client.generate(group="g", sample="g 0")
        fleet.keys["g"] = A
        answer = asyncio.create_task(session(PROMPT))
        await settle()
        await fleet.write(AFTER)
        await fleet.migration.check()
        await settle()
        await whole(fleet, [answer])
        fleet.others[B] = 9
        asyncio.create_task(session(PROMPT))  # noqa: RUF006  it is cancelled with the client
        await settle()
        assert fleet.asked == [A, B, B]

    played(play)


@given(st.lists(st.integers(1, 7), max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=100, deadline=None)
def test_however_often_an_answer_moves_and_weights_change_it_has_every_token_once(
    steps: list[int], publishes: list[bool]
) -> None:
    async def play(fleet: Fleet) -> None:
        asking = [asyncio.create_task(fleet.client.generate(group="g", sample="g 0")(PROMPT))]
        await settle()
        for tokens, publish in zip(steps, publishes, strict=False):
            await fleet.write(tokens)
            fleet.others = Counter({next(iter(fleet.open.values()), ("",))[0]: 3})  # its engine is the busy one
            await fleet.migration.check()
            if publish:
                fleet.client.inflight.hold()
                await settle()
                fleet.version += 1
                fleet.client.inflight.release(fleet.version)
            await settle()
        (found,) = await whole(fleet, asking)
        moves = fleet.client.inflight.figures.continued["moved"]
        assert moves == len(fleet.aborts) <= sum(steps) // AFTER
        assert not any(span.inferred for span in found.versions)

    played(play)


def test_an_answer_moves_again_only_after_as_many_tokens() -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        for tokens in (0, AFTER - 1, 1):
            await fleet.write(tokens)
            fleet.others = Counter({fleet.asked[-1]: 5})
            await fleet.migration.check()
            await settle()
        assert fleet.asked == [A, A, B, A]
        await whole(fleet, asking)

    played(play)


@pytest.mark.parametrize("when", ["before", "while the router is asked"])
def test_no_answer_moves_while_requests_are_held_back(when: str) -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        if when == "before":
            fleet.client.inflight.hold()
        else:
            fleet.meanwhile = fleet.client.inflight.hold
        await fleet.migration.check()
        assert not fleet.aborts
        fleet.client.inflight.release(1)
        await whole(fleet, asking)

    played(play)


def test_an_answer_that_a_publish_meets_on_its_way_waits_for_the_new_version() -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        fleet.slow_aborts = []
        await fleet.migration.check()
        fleet.client.inflight.hold()
        await fleet.abort()
        assert fleet.loads() == {A: 1, B: 0}  # it has left, and is not sent yet
        fleet.version = 1
        fleet.client.inflight.release(1)
        await settle()
        first, _ = await whole(fleet, asking)
        assert first.versions == [VersionSpan(0, 0, AFTER), VersionSpan(1, AFTER, LIMIT)]

    played(play)


def test_no_answer_moves_while_engines_are_lent() -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        fleet.migration = fleet.mover(lent=[B])
        await fleet.migration.check()
        assert not fleet.aborts
        fleet.urls.remove(B)  # the loan has ended
        fleet.urls.append("http://c:1")
        await fleet.migration.check()
        assert fleet.aborts
        await whole(fleet, asking)

    played(play)


@pytest.mark.parametrize("refusal", [503, httpx.ConnectError("refused"), httpx.ReadTimeout("5 s")])
def test_an_engine_that_does_not_take_the_abort_keeps_the_answer(refusal: int | Exception) -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        fleet.refuses_aborts = refusal
        await fleet.migration.check()
        fleet.refuses_aborts = None
        await fleet.write(1)
        assert fleet.asked == [A, A]
        await fleet.migration.check()  # it may move later
        await settle()
        assert fleet.asked == [A, A, B]
        await whole(fleet, asking)

    played(play)


@pytest.mark.parametrize(
    ("dies", "moment", "continued"),
    [
        (A, "before it has aborted", {"broken": 2}),  # with the answer that does not move
        (A, "after the first tokens", {"moved": 1, "broken": 1}),
        (B, "before it has aborted", {"moved": 1}),
        (B, "after the first tokens", {"moved": 1, "broken": 1}),
    ],
)
def test_an_engine_dies_during_a_move(dies: str, moment: str, continued: dict[str, int]) -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)
        if moment == "before it has aborted":
            fleet.slow_aborts = []
        await fleet.migration.check()
        if moment == "after the first tokens":
            await settle()
            await fleet.write(2)
        await fleet.die(dies)
        await fleet.abort()
        await whole(fleet, asking)
        assert fleet.client.inflight.figures.continued == Counter(continued)

    played(play)


@pytest.mark.parametrize(("left", "moves"), [(LEAST_LEFT, True), (LEAST_LEFT - 1, False)])
def test_an_answer_near_its_limit_does_not_move(left: int, moves: bool) -> None:
    """Its prompt would be longer than what SGLang takes of the context, and there is nothing to gain."""

    async def play(fleet: Fleet) -> None:
        asking = [asyncio.create_task(fleet.client.generate(group="g", sample="g 0")(PROMPT))]
        await settle()
        await fleet.write(LIMIT - left)
        fleet.others[A] = 5
        await fleet.migration.check()
        assert len(fleet.aborts) == moves
        await settle()
        await whole(fleet, asking)

    played(play)


def test_a_router_that_does_not_answer_moves_nothing() -> None:
    async def play(fleet: Fleet) -> None:
        asking = await two_at_one_engine(fleet)

        def fail() -> None:
            raise httpx.ConnectError("refused")

        fleet.meanwhile = fail
        await fleet.migration.check()
        assert not fleet.aborts
        await whole(fleet, asking)

    played(play)


@pytest.mark.parametrize(
    ("loads", "below", "gap", "moved"),
    [
        ({A: 2, B: 0}, 0.5, 2, [A]),
        ({A: 1, B: 0}, 0.5, 2, []),  # it would only change places
        ({A: 4, B: 2}, 0.5, 2, []),
        ({A: 5, B: 2}, 0.5, 2, [A]),
        ({A: 5, B: 2}, 0.3, 2, []),
        ({A: 5, B: 1}, 0.5, 8, []),  # each of four processes might move one
        ({A: 9, B: 0}, 0.5, 8, [A]),
        ({A: 9, B: 9, "http://c:1": 0}, 0.5, 2, [A, B]),  # one of each engine
        ({A: 3, B: 3, "http://c:1": 1}, 0.5, 2, [A]),  # the second would find it no longer idle
    ],
)
def test_answers_leave_engines_that_have_far_more_requests(
    loads: dict[str, int], below: float, gap: int, moved: list[str]
) -> None:
    assert [source for source, _ in moves(loads, below, gap, {A, B})] == moved


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rollout.coalesce": True}, "rollout.coalesce"),
        ({"engine.router_policy": "cache_aware"}, "engine.router_policy"),
        ({"weights.pause_mode": "drain"}, "weights.pause_mode"),
        ({"deterministic": True, "rollout.max_staleness": 0, "rollout.lead": None}, "deterministic"),
        ({"engine.count": 0, "engine.prefill_count": 1, "engine.decode_count": 1}, "engine.prefill_count"),
    ],
)
def test_settings_under_which_answers_cannot_move_are_refused(changes: dict[str, Any], field: str) -> None:
    moving = {"rollout.migrate_after": 100, "rollout.coalesce": False}
    with pytest.raises(ConfigError) as refused:
        tiny_config(**moving | changes)
    assert refused.value.field == field
    assert "rollout.migrate_after=null" in str(refused.value)
    tiny_config(**moving | changes | {"rollout.migrate_after": None})
