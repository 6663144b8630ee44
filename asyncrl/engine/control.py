"""The control plane of every engine, spoken directly (the router answers these paths with 404).

Every call is sent to all engines at once, checked for `success`, and bounded by a deadline. Connections are never kept
between publishes: uvicorn drops idle ones, and a dead connection half-way through a publish would be a broken fleet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from asyncrl.errors import EngineError


@dataclass
class Pause:
    """How long the engines stood still for a publish."""

    began: float
    seconds: float = 0.0


class Fleet:
    """All engines of a run, as the publisher sees them."""

    def __init__(self, urls: Sequence[str], api_key: str, timeout: float) -> None:
        self.urls = tuple(urls)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._pool = ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="engine-control")

    def call(self, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """POST to every engine and wait for all; raises EngineError with each engine that refused."""
        return self.finish(self.start(path, [body or {}] * len(self.urls)))

    def start(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[Future[dict[str, Any]]]:
        """The same without waiting, with a body for each engine: a broadcast needs its receivers under way."""
        return [self._pool.submit(self._post, url, path, body) for url, body in zip(self.urls, bodies, strict=True)]

    def finish(self, calls: Sequence[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Wait for calls that `start` began."""
        answers, problems = [], []
        for call in calls:
            try:
                answers.append(call.result())
            except EngineError as error:
                problems.append(str(error))
        if problems:
            raise EngineError("; ".join(problems))
        return answers

    def _post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._checked("POST", url + path, body)

    def _checked(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{url}: {type(error).__name__} {error}") from None
        answer = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
        answer = answer if isinstance(answer, dict) else {}
        if response.status_code != 200 or answer.get("success") is False:
            raise EngineError(f"{url} answered {response.status_code}: {response.text[:500]}")
        return answer

    def versions(self) -> list[str]:
        """The version that each engine serves."""
        return [str(self._checked("GET", f"{url}/model_info").get("weight_version")) for url in self.urls]

    @contextmanager
    def new_weights(self, version: int) -> Iterator[Pause]:
        """Pause all, open an update; on success set the version once, after the last byte, and go on.

        Requests in flight are kept (`in_place`). On failure the engines stay paused: they may hold mixed weights, which
        nobody must sample from; the error ends the run.
        """
        self.call("/pause_generation", {"mode": "in_place"})  # returns once the decoding step under way has ended
        pause = Pause(began=time.monotonic())
        self.call("/begin_weight_update")
        yield pause
        self.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.call("/end_weight_update")
        served = dict(zip(self.urls, self.versions(), strict=True))
        if set(served.values()) != {str(version)}:
            raise EngineError(f"after publishing version {version} the engines report {served}")
        self.call("/continue_generation")
        pause.seconds = time.monotonic() - pause.began
