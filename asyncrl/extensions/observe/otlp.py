"""OTLP, OpenTelemetry's protocol: spans received from engines and router, and spans sent to a collector.

receiver    engines send over HTTP, to the rollout process's server; the router (smg) only over gRPC, to a port of the
            loopback. Both present a key of the run that opens nothing else. What is too large or malformed is refused,
            and spans of other traces than the run's are left out
exporter    a thread follows the timelines of all processes and sends their spans. It never holds up the run: what the
            collector does not take is counted and warned of
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncRLError, RecordError
from asyncrl.extensions.observe.spans import Attributes, Span, TraceBuilder, run_prefix
from asyncrl.extensions.timelines.files import EngineSpan
from asyncrl.extensions.timelines.reader import TimelineReader

MOST_BYTES = 16 << 20
"""Maximum size of a message with spans."""
MOST_ATTRIBUTES, MOST_CHARACTERS = 64, 512
PATH = "/v1/traces"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
ROUTER = "router"
CHUNK = 512
"""Number of spans that are sent at once."""
POLL_SECONDS, END_SECONDS, TELL_SECONDS = 1.0, 10.0, 60.0


# -- the receiver ------------------------------------------------------------------------------------------------


def received(data: bytes, run: str) -> list[EngineSpan]:
    """Return the spans of a run's traces in an ExportTraceServiceRequest. Raises ValueError if it is none."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not an ExportTraceServiceRequest: {error}") from None
    prefix, found = run_prefix(run), []
    for resource in request.resource_spans:
        service = str(_attributes(resource.resource.attributes).get("service.name", "?"))
        service = ROUTER if service == "smg" else service
        for one in (span for scope in resource.scope_spans for span in scope.spans):
            trace, place, parent = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
            whole = len(place) == 16 and len(trace) == 32 and one.start_time_unix_nano <= one.end_time_unix_nano
            if whole and trace.startswith(prefix):
                start, end = one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9
                name, told = one.name[:MOST_CHARACTERS], _attributes(one.attributes)
                found.append(EngineSpan(service, name, trace, place, parent, start, end, told))
    return found


def _attributes(pairs: Iterable[Any]) -> Attributes:
    """Return the attributes that are texts or numbers."""
    found: Attributes = {}
    for pair in islice(pairs, MOST_ATTRIBUTES):
        kind = pair.value.WhichOneof("value")
        if kind == "string_value":
            found[pair.key[:MOST_CHARACTERS]] = pair.value.string_value[:MOST_CHARACTERS]
        elif kind in ("int_value", "double_value", "bool_value"):
            found[pair.key[:MOST_CHARACTERS]] = float(getattr(pair.value, kind))
    return found


class SpanReceiver:
    """Receives the spans of a run, and passes them to `write`, which is called from threads."""

    def __init__(self, run: str, key: str, write: Callable[[EngineSpan], None]) -> None:
        self._run, self._key, self._write = run, key, write
        self._grpc: Any = None

    def allows(self, authorization: str) -> bool:
        """Return whether this is the header of a sender of the run."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode())

    def take(self, data: bytes) -> None:
        """Write the spans in a message. Raises ValueError if it is malformed."""
        for span in received(data, self._run):
            self._write(span)

    def listen(self, address: str) -> None:
        """Receive over gRPC at an address, HOST:PORT. Raises AsyncRLError if it is taken."""
        import grpc

        def export(data: bytes, context: Any) -> bytes:
            if not self.allows(dict(context.invocation_metadata()).get("authorization", "")):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing key")
            try:
                self.take(data)
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return b""

        handlers = grpc.method_handlers_generic_handler(
            SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(export)}
        )
        options = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.so_reuseport", 0)]
        self._grpc = grpc.server(ThreadPoolExecutor(1, "router-spans"), handlers=[handlers], options=options)
        try:
            self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise AsyncRLError(f"the router's spans cannot be received at {address}: {error}") from None
        self._grpc.start()

    def close(self) -> None:
        """Stop listening."""
        if self._grpc:
            self._grpc.stop(None).wait()


# -- the exporter ------------------------------------------------------------------------------------------------


class SpanExporter:
    """Sends the spans of a run that are recorded from now on to a collector, in a thread."""

    def __init__(self, run_dir: Path, run: str, endpoint: str, warn: Callable[[str], None]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._reader, self._build = TimelineReader(run_dir), TraceBuilder(run)
        self._reader.skip()
        self._endpoint, self._warn, self._warned = endpoint, warn, -TELL_SECONDS
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=END_SECONDS)
        self.sent = self.dropped = 0
        """Number of spans that the collector took, and that it did not take."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is recorded so far, as far as the collector takes it within END_SECONDS."""
        self._closing.set()
        self._thread.join(END_SECONDS)
        self._exporter.shutdown()
        if self._thread.is_alive():
            self._warn(f"{self._endpoint} (observe.endpoint) did not take the last spans within {END_SECONDS:.0f} s")

    def _run(self) -> None:
        try:
            while not self._closing.wait(POLL_SECONDS):
                self._send()
            self._send()
        except (RecordError, OSError) as error:
            self._warn(f"no more spans are sent to {self._endpoint} (observe.endpoint): {error}")

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = self._spans()
        while chunk := list(islice(spans, CHUNK)):
            if self._exporter.export([_readable(span) for span in chunk]) is SpanExportResult.SUCCESS:
                self.sent += len(chunk)
                continue
            self.dropped += len(chunk)
            if time.monotonic() - self._warned > TELL_SECONDS:
                self._warned = time.monotonic()
                self._warn(f"{self._endpoint} (observe.endpoint) takes no spans: {self.dropped} were dropped so far")

    def _spans(self) -> Iterator[Span]:
        for record in self._reader.new():
            yield from self._build.spans(record)


def _readable(span: Span) -> Any:
    """Return a span in the form of OpenTelemetry's exporters."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(place: str) -> Any:
        return SpanContext(int(span.trace, 16), int(place, 16), is_remote=False, trace_flags=TraceFlags(1))

    return ReadableSpan(
        span.name,
        context(span.span),
        context(span.parent) if span.parent else None,
        _resource(span.service),
        span.attributes,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=int(span.start * 1e9),
        end_time=int(span.end * 1e9),
    )


@lru_cache
def _resource(service: str) -> Any:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": service, "service.namespace": "asyncrl"})
