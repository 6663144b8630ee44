"""An endpoint with the OpenAI API that gives scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.fakes import JsonHandler


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Start an endpoint with the OpenAI API. Yields its address, and the key and the body of each request."""
    asked: list[tuple[str, Any]] = []

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.headers["authorization"], body))
            status, content = answer(body)
            self.answer(status, content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def saying(content: str | None, **more: Any) -> tuple[int, Any]:
    """Status and body of an answer with this message."""
    message = {"role": "assistant", "content": content, **more}
    return 200, {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [
        {"index": 0, "finish_reason": "stop", "message": message}
    ]}  # fmt: skip
