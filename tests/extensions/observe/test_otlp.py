"""Spans arrive as they were sent, and only those of the run; a collector that fails costs spans, never the run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs asyncrl[tracing]")

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from asyncrl.extensions.observe import otlp
from asyncrl.extensions.observe.otlp import SERVICE, SpanExporter, received
from asyncrl.extensions.observe.spans import Span, run_prefix, trace_id
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.files import EngineSpan
from asyncrl.extensions.timelines.reader import TimelineReader
from asyncrl.network import ports
from asyncrl.observability.timeline import GroupTimeline, ProcessSpan
from asyncrl.rollout.server import RolloutServer
from tests.extensions.observe.collector import collector
from tests.extensions.observe.observing import observing
from tests.fakes import FakeClient, addresses

RUN = "run0"
TRACE = trace_id(RUN, "g0")


def encoded(*spans: Span) -> Any:
    return encode_spans([otlp._readable(span) for span in spans])


def span(service: str = "engine-0", trace: str = TRACE, **attributes: Any) -> Span:
    return Span(service, "t", "Req", trace, "b" * 16, "c" * 16, 1000.25, 1001.5, attributes)


def test_own_spans_arrive_as_sent_and_others_do_not() -> None:
    message = encoded(span(rid="r1", tokens=3), span("smg"), span(trace="0" * 24 + "12345678"))
    expected = EngineSpan("engine-0", "Req", TRACE, "b" * 16, "c" * 16, 1000.25, 1001.5, {"rid": "r1", "tokens": 3.0})
    found = received(message.SerializeToString(), RUN)
    assert found[0] == expected
    assert [one.service for one in found] == ["engine-0", "router"]
    assert received(message.SerializeToString(), "another") == []


def test_what_is_malformed_or_too_long_is_left_out() -> None:
    message = encoded(span(**{"a" * 1000: "x" * 10_000}, **{f"n{n}": n for n in range(100)}), span(), span(), span())
    spans = [one for resource in message.resource_spans for scope in resource.scope_spans for one in scope.spans]
    spans[1].trace_id = bytes.fromhex(run_prefix(RUN))
    spans[2].span_id = b""
    spans[3].end_time_unix_nano = 1
    (found,) = received(message.SerializeToString(), RUN)
    assert len(found.attributes) <= 64
    assert max(map(len, found.attributes)) == 512
    for junk in (b"\xff" * 40, b'{"resourceSpans": []}'):
        with pytest.raises(ValueError, match="not an ExportTraceServiceRequest"):
            received(junk, RUN)


def test_engines_need_the_key_and_bad_messages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.extensions.observe.hooks.MOST_BYTES", 4000)
    warnings: list[str] = []
    spans = f"127.0.0.1:{ports.free_port('127.0.0.1')}"
    where = addresses(api_key="api", extensions={"observe": {"spans": spans, "key": "tracing"}})
    hooks = observing(tmp_path, warnings.append, where, engines=True)
    message = encoded(span(rid="http")).SerializeToString()

    async def posts() -> list[int]:
        client: Any = FakeClient()
        server = RolloutServer(client, client, None, "api")
        server.more = list(hooks.routes(server, dict))
        transport = httpx.ASGITransport(app=server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            answers = [
                await http.post("/v1/traces", content=content, headers={"authorization": f"Bearer {key}"})
                for content, key in (
                    (message, "tracing"),
                    (message, "api"),
                    (b"\xff", "tracing"),
                    (b"x" * 5000, "tracing"),
                )
            ]
            answers.append(await http.get("/status", headers={"authorization": "Bearer tracing"}))
        return [answer.status_code for answer in answers]

    assert asyncio.run(posts()) == [200, 401, 400, 413, 401]
    with grpc.insecure_channel(spans) as channel:
        export = channel.unary_unary(f"/{SERVICE}/Export")
        export(encoded(span("smg")).SerializeToString(), metadata=[("authorization", "Bearer tracing")], timeout=60)
        for key, content, code in (
            ("api", message, grpc.StatusCode.UNAUTHENTICATED),
            ("tracing", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                export(content, metadata=[("authorization", f"Bearer {key}")], timeout=60)
            assert refused.value.code() is code
    asyncio.run(hooks.close())
    found = [record for record in TimelineReader(tmp_path).new() if isinstance(record, EngineSpan)]
    assert [one.service for one in found] == ["engine-0", "router"]
    assert warnings == []


# -- the exporter ------------------------------------------------------------------------------------------------


def record(number: int) -> GroupTimeline:
    return GroupTimeline(f"g{number}", number, "copy", "training", 0, 1.0, 2.0, "committed", [])


def test_collector_gets_all_spans_of_this_start_once(tmp_path: Path) -> None:
    rollout = files.writer(tmp_path, "rollout")
    rollout.write(record(0))
    rollout.flush()
    with collector([200]) as (endpoint, taken):
        warnings: list[str] = []
        exporter = SpanExporter(tmp_path, RUN, endpoint, warnings.append)
        trainer = files.writer(tmp_path, "trainer 0")
        trainer.write(ProcessSpan("trainer 0", "forward", 2.0, 2.5, 0))
        rollout.write(record(1))
        for writer in (rollout, trainer):
            writer.close()
        exporter.close()
    assert sorted(one.name for _, one in taken) == ["forward", "group g1"]
    assert (exporter.sent, exporter.dropped, warnings) == (2, 0, [])
    ((service, group),) = [one for one in taken if one[1].name == "group g1"]
    assert service == "rollout"
    assert (group.trace_id.hex(), group.start_time_unix_nano) == (trace_id(RUN, "g1"), 10**9)


def test_refused_spans_are_counted_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CHUNK", 2)
    with collector([400, 400, 200]) as (endpoint, taken):
        warnings: list[str] = []
        exporter = SpanExporter(tmp_path, RUN, endpoint, warnings.append)
        rollout = files.writer(tmp_path, "rollout")
        for number in range(6):
            rollout.write(record(number))
        rollout.close()
        exporter.close()
    assert (exporter.sent, exporter.dropped, len(taken)) == (2, 4, 2)
    assert len(warnings) == 1
    assert "2 were dropped" in warnings[0]


def test_a_collector_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "END_SECONDS", 0.5)
    monkeypatch.setattr(otlp, "POLL_SECONDS", 0.05)
    with collector([503]) as (endpoint, _):
        warnings: list[str] = []
        exporter = SpanExporter(tmp_path, RUN, endpoint, warnings.append)
        rollout = files.writer(tmp_path, "rollout")
        rollout.write(record(0))
        rollout.close()
        began = time.monotonic()
        exporter.close()
        assert time.monotonic() - began < 30
    assert warnings
