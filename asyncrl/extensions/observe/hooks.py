"""The rollout process's part: it receives the spans of engines and router, exports all spans, computes the metrics of
episodes, and serves /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.extension import RolloutHooks
from asyncrl.extensions.observe.episodes import EpisodeFigures
from asyncrl.extensions.observe.exposition import PrometheusMetrics
from asyncrl.extensions.observe.otlp import MOST_BYTES, PATH, SpanExporter, SpanReceiver
from asyncrl.extensions.timelines.files import ENGINES, TimelineWriter
from asyncrl.network.addresses import metrics_key
from asyncrl.observability.timeline import Record

if TYPE_CHECKING:
    from asyncrl.extensions.observe.extension import TraceSettings
    from asyncrl.rollout.reporters import RolloutRun
    from asyncrl.rollout.server import RolloutServer


class ObserveRollout(RolloutHooks):
    """Everything of this folder in the rollout process."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._closing: list[Callable[[], None]] = []
        """What ends receiver, timeline and exporter, in this order: each sends to the next."""

    def start(self, run: RolloutRun) -> None:
        """Begin to receive and to export."""
        addresses = run.addresses
        self._key = addresses.api_key
        self._episodes = EpisodeFigures({name: task.correct for name, task in run.tasks.items()})
        self.exposed = PrometheusMetrics(run.run_dir, addresses, run.config.run.name)
        if self._settings.engines:
            told, engines = addresses.extensions["observe"], TimelineWriter(run.run_dir, ENGINES, run.warn)
            self._receiver = SpanReceiver(addresses.run_id, told["key"], engines.record)
            self._receiver.listen(told["spans"])
            self._closing += [self._receiver.close, engines.close]
        if endpoint := self._settings.endpoint:
            exporter = SpanExporter(run.run_dir, addresses.run_id, endpoint, run.warn)
            self._closing.append(exporter.close)

    def record(self, record: Record) -> None:
        """Count it."""
        self._episodes(record)
        self.exposed(record)

    def figures(self) -> dict[str, float]:
        """Return the metrics of episodes."""
        return self._episodes.take_figures()

    def routes(self, server: RolloutServer, status: Callable[[], Mapping[str, Any]]) -> Sequence[Route]:
        """Return /metrics, which has a key of its own, and /v1/traces for engines."""
        self.exposed.now = status
        metrics = Route("/metrics", server.guarded(self.metrics, metrics_key(self._key)))
        return [metrics, *([Route(PATH, self.receive, methods=["POST"])] if self._settings.engines else [])]

    async def metrics(self, _: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self.exposed.render(), media_type="text/plain; version=0.0.4")

    async def receive(self, request: Request) -> Response:
        """Take the spans that an engine sends: POST /v1/traces."""
        if not self._receiver.allows(request.headers.get("authorization", "")):
            return PlainTextResponse("wrong or missing key", status_code=401)
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MOST_BYTES:
                return PlainTextResponse(f"more than {MOST_BYTES} bytes", status_code=413)
        try:
            await asyncio.to_thread(self._receiver.take, bytes(data))
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        return Response(media_type="application/x-protobuf")

    async def close(self) -> None:
        """Write what is left, and send it to the collector."""
        for close in self._closing:
            await asyncio.to_thread(close)
