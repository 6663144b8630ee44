"""The rollout process's part in observability: its timeline, the metrics that are made of it, the spans of engines and
router, and their export."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import time

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from asyncrl.config import Config
from asyncrl.extension import RolloutHooks
from asyncrl.network.addresses import Addresses
from asyncrl.observability.episodes import EpisodeFigures
from asyncrl.observability.otlp import MOST_BYTES, SpanExporter, SpanReceiver
from asyncrl.observability.spans import traceparent
from asyncrl.observability.timeline import ENGINES, ROLLOUT, Record, Started, TimelineWriter, in_sample, sampled
from asyncrl.rollout.exposition import PrometheusMetrics
from asyncrl.rollout.gpus import Gpus
from asyncrl.rollout.timelines import Timelines

Header = Callable[[str, str, int], str]
"""Returns the header `traceparent` of the number-th request of a sample of a group."""


class Observer:
    """Everything that is observed in the rollout process."""

    def __init__(
        self,
        config: Config,
        addresses: Addresses,
        run_dir: Path,
        warn: Callable[[str], None],
        correct: Mapping[str, Callable[[float], bool]],
        hooks: Sequence[RolloutHooks] = (),
    ) -> None:
        """`correct` says for each task whether a reward is that of a correct answer."""
        self._hooks = hooks
        self.gpus, self.exposed = Gpus(), PrometheusMetrics(run_dir, addresses, config.run.name)
        self._episodes = EpisodeFigures(correct)
        enabled = config.metrics.timeline
        self._timeline = TimelineWriter(run_dir, ROLLOUT, warn, enabled=enabled)
        self._engines = TimelineWriter(run_dir, ENGINES, warn, enabled=enabled and config.tracing.engines)
        self._timeline(Started(addresses.run_id, time()))
        listeners: list[Callable[[Record], None]] = [self._episodes, self.exposed, *(one.record for one in hooks)]
        self.timelines = Timelines([sampled(self._timeline, config.metrics.timeline_share)], listeners)
        self._exporter = self._receiver = None
        self._told = self._measured = 0.0
        if config.tracing.engines:
            self._receiver = SpanReceiver(addresses.run_id, addresses.trace_key, self._engines)
            self._receiver.listen(addresses.spans)
        if endpoint := config.tracing.endpoint:
            self._exporter = SpanExporter(run_dir, addresses.run_id, endpoint, warn)

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        total = self.timelines.seconds + self._timeline.seconds + self._engines.seconds
        metrics = self.timelines.metrics_seconds
        seconds = {"time/timeline": total - self._told, "time/metrics": metrics - self._measured}
        self._told, self._measured = total, metrics
        own = {**seconds, **self._episodes.take_figures(), **self.gpus.take_figures()}
        return {**own, **dict(ChainMap(*(one.figures() for one in self._hooks)))}

    def ready(self, started: float) -> None:
        """Record that all engines can answer; the command started at that time."""
        self._timeline.phase("start_up", -1, started, time())

    async def receive(self, request: Request) -> Response:
        """Take the spans that an engine sends: POST /v1/traces."""
        receiver = self._receiver
        if receiver is None or not receiver.allows(request.headers.get("authorization", "")):
            return PlainTextResponse("wrong or missing key", status_code=401)
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MOST_BYTES:
                return PlainTextResponse(f"more than {MOST_BYTES} bytes", status_code=413)
        try:
            await asyncio.to_thread(receiver.take, bytes(data))
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        return Response(media_type="application/x-protobuf")

    def close(self) -> None:
        """Write what is left, and send it to the collector."""
        if self._receiver:
            self._receiver.close()
        self._timeline.close()
        self._engines.close()
        if self._exporter:
            self._exporter.close()


def trace_header(config: Config, addresses: Addresses) -> Header | None:
    """Return what makes the header of each request; None if nobody would continue the trace."""
    if not config.tracing.engines:
        return None

    def header(share: float, uid: str, sample: str, request: int) -> str:
        sampled = in_sample(uid, share)
        return traceparent(addresses.run_id, uid, sample.rpartition(" ")[2], request, sampled=sampled)

    return partial(header, config.metrics.timeline_share)
