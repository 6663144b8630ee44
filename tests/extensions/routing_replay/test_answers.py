"""The experts of an answer's tokens, from an engine that tells them as SGLang does: with the last piece alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl import retries
from asyncrl.engine.client import GenerationClient
from asyncrl.errors import EngineError
from asyncrl.extensions.routing_replay.answers import ReportedExperts
from asyncrl.schema import Completion, VersionSpan
from tests.engine.asking import PROMPT, asked
from tests.examples import examples
from tests.extensions.routing_replay.experts import SHAPE, kept, told
from tests.fakes import FakeEngine, Reply, pieces, stream

WRITTEN = list(range(100, 108))
CUTS = ("abort", "abort in the queue", "broken", "503")
TOLD = {"return_routed_experts", "routed_experts_start_len"}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)


class Engine(FakeEngine):
    """Writes 100, 101, ... after any prompt, cuts its n-th answer in the n-th way after so many more tokens, and is
    its own router."""

    def __init__(self, cuts: list[tuple[str, int]] = [], change: Callable[[bytes], bytes | None] = lambda x: x) -> None:  # noqa: B006
        super().__init__(self._write)
        self._cuts, self._change = cuts, change

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(200, json={"workers": [{"url": "http://engine", "is_healthy": True}]})
        return await super().handle(request)

    def _write(self, request: dict[str, Any]) -> Reply:
        prompt, number = request["input_ids"], len(self.requests) - 1
        begun = next((i for i in range(len(prompt)) if prompt[-i - 1] < 100), 0)
        ids, finish = WRITTEN[begun : begun + request["sampling_params"]["max_new_tokens"]], "length"
        way, place = self._cuts[number] if number < len(self._cuts) else ("", 0)
        if way == "503":
            return httpx.Response(503, text="no available workers")
        if way and place <= len(ids):
            ids, finish = ids[:place], "abort"
        events: list[dict[str, Any]] = []
        for index in range(request["sampling_params"]["n"]):
            spans = [VersionSpan(0, 0, len(ids))] if ids else []
            events += pieces(Completion(ids, [-0.5] * len(ids), spans, finish), index)
            if finish == "abort" and way == "broken":
                events.pop()
            elif request.get("return_routed_experts") and not (finish == "abort" and way == "abort in the queue"):
                rows = told(request["routed_experts_start_len"], len(prompt) + len(ids) - 1, sibling=0).tobytes()
                if (changed := self._change(rows)) is not None:
                    events[-1]["meta_info"]["routed_experts"] = base64.b64encode(changed).decode()
        return stream(events)


def ask(engine: Engine, *turns: list[int], **settings: Any) -> list[Completion]:
    """A first turn and others, each after what `turns` says; all of one session."""

    async def play(client: GenerationClient) -> list[Completion]:
        session, sequence, found = client.generate(), list(PROMPT), []
        for observation in ([], *turns):
            sequence += observation
            found.append(await session(sequence))
            sequence += found[-1].token_ids
        return found

    return list(asked(engine, play, **{"hooks": [ReportedExperts(SHAPE)], "stop_token_ids": [], **settings}))


@given(st.lists(st.tuples(st.sampled_from(CUTS), st.integers(0, 5)), max_size=5), st.integers(1, len(WRITTEN)))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_token_but_the_last_has_its_experts(cuts, limit) -> None:
    engine = Engine(cuts)
    (answer,) = ask(engine, max_new_tokens=limit, retry_timeout=5.0)
    assert answer.token_ids == WRITTEN[:limit]
    read = len(PROMPT) + limit - 1
    assert answer.token_rows.start == 0
    assert answer.token_rows.end <= read
    assert answer.token_rows == kept(0, answer.token_rows.end)
    ended = (
        len(engine.requests[-1]["input_ids"]) - len(PROMPT) + engine.requests[-1]["sampling_params"]["max_new_tokens"]
    )  # a stream that broke after its last token is not asked anew for their sake
    if not (len(engine.requests) <= len(cuts) and ended == limit):
        assert answer.token_rows.end == read
    for request in engine.requests:
        assert request["routed_experts_start_len"] < len(request["input_ids"])


def test_a_later_turn_asks_only_for_what_it_adds() -> None:
    engine = Engine()
    first, second = ask(engine, [1, 2, 3], max_new_tokens=2)
    assert [request["routed_experts_start_len"] for request in engine.requests] == [0, 4]
    assert (first.token_rows, second.token_rows) == (
        kept(0, 4),
        kept(4, 9),
    )  # from the last token of the first answer on


def test_a_conversation_that_was_changed_is_told_from_its_start() -> None:
    async def play(client: GenerationClient) -> Completion:
        session = client.generate()
        await session(PROMPT)
        return await session([*PROMPT, 5])

    assert asked(Engine(), play, hooks=[ReportedExperts(SHAPE)], max_new_tokens=2).token_rows == kept(0, 5)


def test_siblings_have_their_experts_and_evaluation_none() -> None:
    engine = Engine()

    async def play(client: GenerationClient) -> list[Completion]:
        sessions = [client.generate(group="g") for _ in range(2)]
        found = await asyncio.gather(*[session(PROMPT) for session in sessions])
        return [*found, await client.generate(0.0, purpose="evaluation")(PROMPT)]

    *siblings, judged = asked(engine, play, hooks=[ReportedExperts(SHAPE)], max_new_tokens=3)
    assert [one.token_rows for one in siblings] == [kept(0, 5)] * 2
    assert judged.token_rows is None
    assert [request.keys() >= TOLD for request in engine.requests] == [True, False]


FAULTS: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "none told": (lambda _: None, "reported the experts of 0 of 4 tokens"),
    "too few": (lambda rows: rows[: 2 * SHAPE.told], "reported the experts of 2 of 4 tokens"),
    "another shape": (lambda rows: rows[:-4], "do not fit the model: .*not rows of 4 x 2"),
    "another model": (lambda rows: b"\x09\0\0\0" * (len(rows) // 4), "do not fit the model: expert 9 of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_engine_that_does_not_tell_experts_is_an_error(fault: str) -> None:
    change, reason = FAULTS[fault]
    with pytest.raises(EngineError, match=reason):
        ask(Engine(change=change), max_new_tokens=2)
