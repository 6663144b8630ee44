"""Engine loads are read in SGLang's format, and engines that report none are left out."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from asyncrl.engine.loads import Load, Loads, load_of
from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access

RANK = {
    "dp_rank": 0,
    "num_running_reqs": 3,
    "num_waiting_reqs": 1,
    "num_used_tokens": 500,
    "max_total_num_tokens": 1000,
    "total_prefill_uncached_tokens": 900,
    "total_prefill_busy_us": 2_500_000,
}


def asked(answers: dict[str, httpx.Response | Exception]) -> list[Load]:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(200, json={"workers": [{"url": f"http://{name}"} for name in answers]})
        assert request.url.path == "/v1/loads"
        answer = answers[str(request.url.host)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> list[Load]:
        loads = Loads("http://router", Access(""), httpx.MockTransport(handle))
        try:
            return await loads.ask()
        finally:
            await loads.close()

    return asyncio.run(main())


def test_an_engine_is_the_sum_of_its_data_parallel_ranks() -> None:
    assert load_of([RANK]) == Load(3, 1, 500.0, 1000.0, 900.0, 2.5)
    assert load_of([RANK, RANK]) == Load(6, 2, 1000.0, 2000.0, 1800.0, 5.0)


def test_engines_that_are_dead_or_refuse_are_left_out() -> None:
    whole = httpx.Response(200, json={"loads": [RANK]})
    answers = {"a": whole, "b": httpx.ConnectError("refused"), "c": httpx.Response(503), "d": whole}
    assert asked(answers) == [load_of([RANK], f"http://{name}") for name in "ad"]


def test_an_engine_that_does_not_know_the_question_is_too_old() -> None:
    with pytest.raises(EngineError, match=r"GET /v1/loads.*0\.5\.20"):
        asked({"a": httpx.Response(404)})
