"""Engine loads are read in SGLang's format, and engines that report none are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from asyncrl.engine.loads import Load, Loads, More, load_of
from asyncrl.errors import EngineError
from asyncrl.metrics.fields import STEP_BY_ENGINE, STEP_ENGINES
from asyncrl.network.addresses import Access
from tests.engine.asking import RANK


def asked(answers: dict[str, httpx.Response | Exception], more: Sequence[More] = ()) -> list[Load]:
    """Return the loads of the engines that the router knows."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(200, json={"workers": [{"url": f"http://{name}"} for name in answers]})
        assert request.url.path == "/v1/loads"
        answer = answers[str(request.url.host)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> list[Load]:
        loads = Loads("http://router", Access(""), httpx.MockTransport(handle), more)
        try:
            return await loads.ask()
        finally:
            await loads.close()

    return asyncio.run(main())


def test_an_engine_is_the_sum_of_its_data_parallel_ranks() -> None:
    assert load_of([RANK]) == Load(3, 1, 500.0, 1000.0, 900.0, 2.5, longest=1000.0)
    assert load_of([RANK, RANK]) == Load(6, 2, 1000.0, 2000.0, 1800.0, 5.0, longest=1000.0)


def test_engines_that_are_dead_or_refuse_are_left_out() -> None:
    whole = httpx.Response(200, json={"loads": [RANK]})
    answers = {"a": whole, "b": httpx.ConnectError("refused"), "c": httpx.Response(503), "d": whole}
    assert asked(answers) == [load_of([RANK], f"http://{name}") for name in "ad"]


def test_an_engine_that_does_not_know_the_question_is_too_old() -> None:
    with pytest.raises(EngineError, match=r"GET /v1/loads.*0\.5\.21"):
        asked({"a": httpx.Response(404)})


def test_figures_have_documented_names_per_engine() -> None:
    loads = Loads("http://router", Access(""))
    assert loads.figures() == {}
    loads.latest = [load_of([RANK], "http://a:1")]
    figures = loads.figures()
    own = [name.replace("<engine>", "a:1") for name in STEP_BY_ENGINE]
    assert sorted(figures) == sorted([*STEP_ENGINES, *own])
    assert figures["engines/cache_use"] == figures["engine/a:1/cache_use"] == 0.5


def test_what_extensions_know_of_an_engine_is_beside_its_load() -> None:
    async def known(http: httpx.AsyncClient, urls: Sequence[str]) -> dict[str, dict[str, float]]:
        return {urls[0]: {"tokens_per_s": 5.0}}

    whole = httpx.Response(200, json={"loads": [RANK]})
    found = asked({"a": whole, "b": whole}, [known, known])
    assert [load.more for load in found] == [{"tokens_per_s": 5.0}, {}]
