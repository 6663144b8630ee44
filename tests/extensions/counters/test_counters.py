"""Counters of engines give rates, under documented names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from asyncrl.engine.loads import Loads
from asyncrl.extensions.counters import counters as module
from asyncrl.extensions.counters.counters import Counters, counters_of, rates_of
from asyncrl.metrics.fields import unknown
from asyncrl.network.addresses import Access
from asyncrl.rollout.reporters import RolloutRun
from tests.engine.asking import RANK
from tests.fakes import addresses, tiny_config

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


def test_figures_have_documented_names_per_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SCRAPE_SECONDS", 0.0)
    decoded = iter((100, 300))
    counters = Counters()
    counters.start(RolloutRun(tiny_config(), addresses(), tmp_path, print))  # type: ignore[arg-type]

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=COUNTERS % next(decoded))
        answers = {"/workers": {"workers": [{"url": "http://a:1"}]}, "/v1/loads": {"loads": [RANK]}}
        return httpx.Response(200, json=answers[request.url.path])

    async def main() -> None:
        loads = Loads("http://router", Access(""), httpx.MockTransport(handle), [counters.engines])
        assert counters.figures() == {}
        for _ in range(2):
            (load,) = await loads.ask()
        assert (await loads.recent(60.0)) == [load]
        assert load.more["preemptions"] == 2.0
        await loads.close()

    asyncio.run(main())
    counted = counters.figures()
    assert len(counted) == 5
    assert unknown(counted) == []
    assert counted["engines/tokens_per_s"] == counted["engine/a:1/tokens_per_s"] > 200
