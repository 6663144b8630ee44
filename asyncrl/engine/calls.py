"""Client of the engines' control endpoints, which it calls directly because the router answers these paths with 404.

A call goes to all engines at once, is checked for `success`, and has a deadline. An engine that fails one is lost.
Connections are kept only for the calls of one publish: uvicorn drops idle ones after 5 s, and a dead connection in the
middle of a publish would cost an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from asyncrl.errors import AsyncRLError, DeadlineExceeded, EngineError
from asyncrl.network.addresses import Access

KEPT_SECONDS = 1.0
"""Seconds for which an idle connection may be reused."""

Answer = dict[str, Any]
Calls = dict[str, "Future[Answer]"]


class CallRefused(EngineError):
    """An engine answered, but without success. `status` is the HTTP status code."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class EngineCalls(ABC):
    """Calls to engines. `timeout` is that of each, in seconds."""

    def __init__(self, access: Access, timeout: float) -> None:
        self.timeout = timeout
        self._http = httpx.Client(
            **access.http,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_SECONDS),
        )
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="engine-control")

    @property
    @abstractmethod
    def urls(self) -> tuple[str, ...]:
        """URLs of all engines that are called."""

    @abstractmethod
    def lose(self, url: str, reason: str) -> None:
        """Call an engine no more."""

    def call(self, path: str, body: Answer | None = None) -> dict[str, Answer]:
        """POST to every engine, wait for all, and return the answers by engine. Engines that fail are lost."""
        return self.on_each(lambda url: self.post(url, path, body))

    def on_each(self, step: Callable[[str], Answer], urls: Iterable[str] | None = None) -> dict[str, Answer]:
        """Run a step for every engine, or for these, at once, and return the answers. Engines whose step fails are
        lost."""
        return self.finish(self.begin(step, self.urls if urls is None else urls))

    def begin(self, step: Callable[[str], Answer], urls: Iterable[str]) -> Calls:
        """Begin a step for each of these engines without waiting."""
        return {url: self._pool.submit(step, url) for url in urls}

    def start(self, path: str, bodies: Mapping[str, Answer]) -> Calls:
        """POST a body to each engine without waiting: a broadcast needs its receivers to be running."""
        return self.begin(lambda url: self.post(url, path, bodies[url]), bodies)

    def finish(self, calls: Calls) -> dict[str, Answer]:
        """Wait for the calls that `start` began and return the answers. Engines that fail are lost."""
        answers, problems = self.settle(calls)
        for url, problem in problems.items():
            self.lose(url, str(problem))
        return answers

    def settle(self, calls: Calls) -> tuple[dict[str, Answer], dict[str, AsyncRLError]]:
        """Wait for the calls that `start` began and return the answers and the errors, both by engine."""
        answers: dict[str, Answer] = {}
        problems: dict[str, AsyncRLError] = {}
        for url, call in calls.items():
            try:
                answers[url] = call.result()
            except (EngineError, DeadlineExceeded) as error:
                problems[url] = error
        return answers, problems

    def post(self, url: str, path: str, body: Answer | None = None, timeout: float | None = None) -> Answer:
        """POST to one engine. Raises EngineError, or CallRefused when the engine answered without success."""
        return self._checked("POST", url + path, body or {}, timeout)

    def get(self, url: str, path: str, timeout: float | None = None) -> Answer:
        """GET from one engine. Raises the same errors as `post`."""
        return self._checked("GET", url + path, None, timeout)

    def _checked(self, method: str, url: str, body: Answer | None = None, timeout: float | None = None) -> Answer:
        try:
            response = self._http.request(method, url, json=body, timeout=timeout or self.timeout)
        except httpx.HTTPError as error:
            raise EngineError(f"{url}: {type(error).__name__} {error}") from None
        answer = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
        answer = answer if isinstance(answer, dict) else {"": answer}
        if response.status_code != 200 or answer.get("success") is False:
            raise CallRefused(f"{url} answered {response.status_code}: {response.text[:500]}", response.status_code)
        return answer

    def versions(self) -> dict[str, str]:
        """Return the weight version that each engine serves. Engines that do not report one are lost."""
        answers = self.on_each(lambda url: self.get(url, "/model_info"))
        return {url: str(answer.get("weight_version")) for url, answer in answers.items()}

    def close(self) -> None:
        """Close the connections and stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()
