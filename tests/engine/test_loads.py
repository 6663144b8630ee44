"""Engine loads are read in SGLang's format, and engines that report none are left out."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from asyncrl.engine import loads as module
from asyncrl.engine.loads import Load, Loads, counters_of, load_of, rates_of
from asyncrl.errors import EngineError
from asyncrl.metrics.fields import STEP_BY_ENGINE, STEP_ENGINE_COUNTERS, STEP_ENGINES
from asyncrl.network.addresses import Access
from tests.engine.asking import RANK


def asked(answers: dict[str, httpx.Response | Exception]) -> list[Load]:
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
        loads = Loads("http://router", Access(""), httpx.MockTransport(handle))
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
    with pytest.raises(EngineError, match=r"GET /v1/loads.*0\.5\.20"):
        asked({"a": httpx.Response(404)})


COUNTERS = """# HELP sglang:realtime_tokens_total Total number of tokens processed by mode.
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 10.0
sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 30.0
sglang:realtime_tokens_total{mode="decode",tp_rank="0",dp_rank="0"} %d
sglang:realtime_tokens_total{mode="decode",tp_rank="0",dp_rank="1"} 1.0
sglang:num_retracted_requests_total{tp_rank="0"} 2.0
sglang:generation_tokens_total{is_streaming="false"} 99.0
"""


def test_counters_are_summed_over_ranks_and_give_rates() -> None:
    before, now = counters_of(COUNTERS % 100), counters_of(COUNTERS % 300)
    assert before == {"prefill_compute": 10.0, "prefill_cache": 30.0, "decode": 101.0, "retracted": 2.0}
    assert rates_of(before, now, 4.0) == {"tokens_per_s": 50.0, "preemptions": 2.0}
    assert rates_of({}, before, 1.0) == {"tokens_per_s": 101.0, "preemptions": 2.0, "cache_hit": 0.75}
    assert rates_of(now, before, 1.0)["tokens_per_s"] == 101.0  # it was restarted


def test_figures_have_documented_names_per_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCRAPE_SECONDS", 0.0)
    decoded = iter((100, 300))

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=COUNTERS % next(decoded))
        answers = {"/workers": {"workers": [{"url": "http://a:1"}]}, "/v1/loads": {"loads": [RANK]}}
        return httpx.Response(200, json=answers[request.url.path])

    async def main() -> dict[str, float]:
        loads = Loads("http://router", Access(""), httpx.MockTransport(handle), metrics=True)
        assert loads.figures() == {}
        for _ in range(2):
            (load,) = await loads.ask()
        assert (await loads.recent(60.0)) == [load]
        assert load.preemptions == 2.0
        await loads.close()
        return loads.figures()

    figures = asyncio.run(main())
    own = [name.replace("<engine>", "a:1") for name in STEP_BY_ENGINE]
    assert sorted(figures) == sorted([*STEP_ENGINES, *STEP_ENGINE_COUNTERS, *own])
    assert figures["engines/cache_use"] == figures["engine/a:1/cache_use"] == 0.5
    assert figures["engines/tokens_per_s"] == figures["engine/a:1/tokens_per_s"] > 200
