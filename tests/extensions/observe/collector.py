"""A collector of OpenTelemetry spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def collector(statuses: list[int]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A collector that answers with these statuses, the last one from then on. It keeps the spans that it took, with
    their services."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            if status == 200:
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    spans = (one for scope in resource.scope_spans for one in scope.spans)
                    taken.extend((named["service.name"], one) for one in spans)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
    finally:
        server.shutdown()
        server.server_close()
