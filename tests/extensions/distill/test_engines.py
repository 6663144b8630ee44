"""Log-probabilities from a teacher's engines over real sockets: faults, fail-over, and answers that must not be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.extensions.distill.engines import TeacherEngines
from asyncrl.network.addresses import Access

TOKENS = [12, 1, 2, 11, 5, 6, 15]
START = 4
Fault = str | int | dict[str, Any]


def answer(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return an answer of SGLang 0.5.21: the first entry has no log-probability, and id 16 is reported as 0."""
    first = request["logprob_start_len"]
    ids = request["input_ids"][first:]
    entries = [[None if i == 0 else -0.1 * (first + i), 0 if t == 15 else t, None] for i, t in enumerate(ids)]
    meta = {"finish_reason": {"type": "length", "length": 0}, "cached_tokens": 3, "input_token_logprobs": entries}
    return {"text": "", "output_ids": [], "meta_info": meta | changes}


class Engine:
    """Listens; behaves badly in the order of `faults`, and then well. A fault is a status, "reset", "hang", "cut",
    "garbage", or changes of the answer's meta_info."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults, self.requests, self.keys = list(faults), [], []
        self.running = self.most = 0
        self.up = True

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if "get /health" in head:
                await self._reply(writer, 200 if self.up else 503, b"")
                return
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            request = json.loads(await reader.readexactly(size))
            self.requests.append(request)
            self.keys.append(head.partition("authorization: ")[2].partition("\r\n")[0])
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            await self._behave(writer, request, self.faults.pop(0) if self.faults else {})
            self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _behave(self, writer: asyncio.StreamWriter, request: dict[str, Any], fault: Fault) -> None:
        body = json.dumps(answer(request, **(fault if isinstance(fault, dict) else {}))).encode()
        if fault == "reset":
            writer.transport.abort()
        elif fault == "hang":
            await asyncio.sleep(4.0)
        elif fault == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + body)
        elif isinstance(fault, int):
            await self._reply(writer, fault, b"no")
        else:
            await self._reply(writer, 200, b"{" if fault == "garbage" else body)

    async def _reply(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


def scored(
    *engines: Engine, ask: Callable[[TeacherEngines], Awaitable[Any]] | None = None, **settings: Any
) -> tuple[Any, TeacherEngines]:
    """Return the result of one request, or of `ask`."""

    async def main() -> tuple[Any, TeacherEngines]:
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(engine)).url for engine in engines]
            options = {
                "access": Access("key0"),
                "max_running": 8,
                "request_timeout": 60.0,
                "retry_timeout": 5.0,
            } | settings
            scorer = TeacherEngines(urls, **options)
            stack.push_async_callback(scorer.close)
            async with asyncio.timeout(120):
                return await (ask(scorer) if ask else scorer.logprobs(TOKENS, START, "g1")), scorer

    return asyncio.run(main())


RIGHT = pytest.approx([-0.4, -0.5, -0.6])


def test_request_prefills_from_before_and_writes_nothing() -> None:
    engine = Engine()
    found, scorer = scored(engine)
    assert found == RIGHT
    assert engine.requests == [
        {
            "input_ids": TOKENS,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": START - 1,
        }
    ]
    assert engine.keys == ["bearer key0"]
    figures = scorer.take_figures()
    assert (figures.tokens, figures.cached, figures.retried) == (len(TOKENS), 3, 0)
    assert scorer.take_figures().tokens == 0


def test_without_a_key_none_is_sent() -> None:
    engine = Engine()
    scored(engine, access=Access(""))
    assert engine.keys == [""]


@pytest.mark.parametrize("fault", [503, 429, 500, "reset", "hang", "cut", "garbage"])
def test_passing_fault_is_asked_again(fault: Fault) -> None:
    engine = Engine([fault, fault])
    found, scorer = scored(engine, request_timeout=2.0 if fault == "hang" else 60.0, retry_timeout=30.0)
    assert found == RIGHT
    assert len(engine.requests) == 3
    assert scorer.take_figures().retried == 2


def test_aborted_request_is_asked_again_and_a_refused_one_is_not() -> None:
    passing = {"finish_reason": {"type": "abort", "message": "busy", "status_code": 503}}
    assert scored(Engine([passing]))[0] == RIGHT
    final = {"finish_reason": {"type": "abort", "message": "exceeds the KV memory", "status_code": 400}}
    with pytest.raises(EngineError, match="exceeds the KV memory"):
        scored(Engine([final]))


def test_absent_engine_is_given_up_with_its_last_words() -> None:
    engine = Engine([503] * 1000)
    with pytest.raises(EngineError, match=r"no engine of the teacher answered for .*answered 503.*retry_timeout"):
        scored(engine, retry_timeout=0.3)
    assert 2 <= len(engine.requests) < 20


def test_engine_that_refuses_connections_fails_over_at_once() -> None:
    async def ask(scorer: TeacherEngines) -> Any:
        return [await scorer.logprobs(TOKENS, START, f"g{i}") for i in range(8)]

    dead, alive = Engine(), Engine()

    async def main() -> tuple[Any, int]:
        async with dead, alive:
            pass
        async with alive:  # the other's port is closed
            options = {"access": Access(""), "max_running": 8, "request_timeout": 60.0, "retry_timeout": 60.0}
            scorer = TeacherEngines([dead.url, alive.url], **options)
            async with asyncio.timeout(120):
                found = await ask(scorer)
            await scorer.close()
            return found, scorer.take_figures().retried

    found, retried = asyncio.run(main())
    assert found == [RIGHT] * 8
    assert retried == 1  # the dead one rests then


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_token_logprobs": [[None, 11, None], [-0.1, 5, None]]}, "scored 1 tokens of 3"),
        ({"input_token_logprobs": [[-0.1, t, None] for t in (11, 5, 7, 15)]}, "scored token 7 for token 6"),
        ({"input_token_logprobs": [[None, t, None] for t in (11, 5, 6, 15)]}, "no log-probability for token 5"),
        ({"input_token_logprobs": []}, "scored 0 tokens of 3"),
    ],
)
def test_answer_that_is_not_of_these_tokens_is_an_error_at_once(changes: dict[str, Any], text: str) -> None:
    engine = Engine([changes])
    with pytest.raises(EngineError, match=text):
        scored(engine)
    assert len(engine.requests) == 1


def test_refused_request_is_an_error_with_the_engines_words() -> None:
    engine = Engine([400])
    with pytest.raises(EngineError, match="answered 400: no"):
        scored(engine)
    assert len(engine.requests) == 1


def test_siblings_share_an_engine_and_groups_are_spread() -> None:
    engines = [Engine() for _ in range(3)]

    async def ask(scorer: TeacherEngines) -> None:
        prompts = [(f"g{group}", [group, 0, 0, 11, member]) for group in range(30) for member in range(3)]
        await asyncio.gather(*[scorer.logprobs(ids, START, key) for key, ids in prompts])

    scored(*engines, ask=ask, request_timeout=60.0)
    groups = [{request["input_ids"][0] for request in engine.requests} for engine in engines]
    assert sum(map(len, groups)) == 30  # none is at two
    assert all(groups)


def test_no_more_requests_are_under_way_than_allowed() -> None:
    engine = Engine()

    async def ask(scorer: TeacherEngines) -> None:
        await asyncio.gather(*[scorer.logprobs(TOKENS, START, "g") for _ in range(20)])

    scored(engine, ask=ask, max_running=3, request_timeout=60.0)
    assert engine.most == 3


def test_readiness_waits_for_all_and_names_the_missing() -> None:
    up, down = Engine(), Engine()
    down.up = False

    async def ask(scorer: TeacherEngines) -> None:
        with pytest.raises(DeadlineExceeded, match="engines of the teacher") as caught:
            await scorer.wait_until_ready(0.3)
        assert down.url in str(caught.value)
        assert up.url not in str(caught.value)
        down.up = True
        await scorer.wait_until_ready(60.0)

    scored(up, down, ask=ask)
