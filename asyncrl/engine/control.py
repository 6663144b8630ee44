"""The control plane of every engine, spoken directly (the router answers these paths with 404).

Every call goes to all engines at once, is checked for `success`, and bounded by a deadline. An engine that fails a call
is lost: it leaves the fleet and the router, and the others go on; when none is left the error ends the run. Connections
are kept for the calls of one publish only: uvicorn drops idle ones after 5 s, and a dead connection half-way through a
publish would be a lost engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import httpx

from asyncrl.access import Access
from asyncrl.errors import AsyncRLError, DeadlineExceeded, EngineError

PROBE_SECONDS = 5.0
"""How long an engine may take to say that it lives, or to let go of the requests of a fleet that it has left."""
KEPT_SECONDS = 1.0
"""How long an idle connection may be used again."""

Answer = dict[str, Any]
Calls = dict[str, "Future[Answer]"]


class Refusal(EngineError):
    """An engine answered, but not with success; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class Membership(Protocol):
    """Who routes requests to engines (engine/router.py)."""

    def add(self, url: str) -> None:
        """Requests may go to this engine."""
        ...

    def remove(self, url: str) -> None:
        """No request goes there any more."""
        ...

    def keep(self, urls: Sequence[str]) -> None:
        """Add those of these engines that it has forgotten."""
        ...


class Register(Protocol):
    """Who tells of engines that come and go (engine/registry.py)."""

    def joined(self) -> Mapping[str, Any]:
        """By URL, those that others have started."""
        ...

    def leaving(self) -> set[str]:
        """Those that are asked to leave."""
        ...

    def let_go(self, url: str) -> None:
        """This one may be stopped."""
        ...


class Fleet:
    """The engines of a run as one trainer rank sees them: those that serve and those that wait for their weights.

    Only rank 0 has `router` and `register`, and with them the word over who serves; other ranks send weights and report
    whom they lost. Engines that are `attached` were started by others, and wait for weights from the first.
    `on_lost` is told of every engine that is lost, and which of its incarnations; with it the last engine may go, too:
    it will be started again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        access: Access,
        timeout: float,
        *,
        attached: Sequence[str] = (),
        router: Membership | None = None,
        register: Register | None = None,
        on_lost: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._configured, self._attached = (*urls, *attached), set(attached)
        self.serving, self.joining = list(urls), list(attached)
        self.lost: dict[str, str] = {}
        self.changes = 0  # how often an engine came or went: the same URLs may be other processes
        self.timeout = timeout
        self._router, self._register, self._on_lost = router, register, on_lost
        self._incarnations: dict[str, str] = {}  # what an engine without weights of the run said when it came
        self._http = httpx.Client(
            **access.http,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_SECONDS),
        )
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="engine-control")

    @property
    def urls(self) -> tuple[str, ...]:
        """Every engine that gets weights."""
        return (*self.serving, *self.joining)

    # -- calls ---------------------------------------------------------------------------------------------

    def call(self, path: str, body: Answer | None = None) -> dict[str, Answer]:
        """POST to every engine and wait for all. Returns the answers by engine; loses those that failed."""
        return self.on_each(lambda url: self.post(url, path, body))

    def on_each(self, step: Callable[[str], Answer]) -> dict[str, Answer]:
        """Take a step with every engine at once; loses those with which it failed."""
        return self.finish({url: self._pool.submit(step, url) for url in self.urls})

    def start(self, path: str, bodies: Mapping[str, Answer]) -> Calls:
        """POST without waiting, with a body for each engine: a broadcast needs its receivers under way."""
        return {url: self._pool.submit(self.post, url, path, body) for url, body in bodies.items()}

    def finish(self, calls: Calls) -> dict[str, Answer]:
        """Wait for calls that `start` began; loses engines that failed theirs."""
        answers, problems = self.settle(calls)
        for url, problem in problems.items():
            self.lose(url, str(problem))
        return answers

    def settle(self, calls: Calls) -> tuple[dict[str, Answer], dict[str, AsyncRLError]]:
        """Wait for calls that `start` began; answers and problems by engine."""
        answers: dict[str, Answer] = {}
        problems: dict[str, AsyncRLError] = {}
        for url, call in calls.items():
            try:
                answers[url] = call.result()
            except (EngineError, DeadlineExceeded) as error:
                problems[url] = error
        return answers, problems

    def post(self, url: str, path: str, body: Answer | None = None, timeout: float | None = None) -> Answer:
        """One call to one engine. Raises EngineError, or Refusal when the engine answered."""
        return self._checked("POST", url + path, body or {}, timeout)

    def get(self, url: str, path: str, timeout: float | None = None) -> Answer:
        """The same with GET."""
        return self._checked("GET", url + path, None, timeout)

    def _checked(self, method: str, url: str, body: Answer | None = None, timeout: float | None = None) -> Answer:
        try:
            response = self._http.request(method, url, json=body, timeout=timeout or self.timeout)
        except httpx.HTTPError as error:
            raise EngineError(f"{url}: {type(error).__name__} {error}") from None
        answer = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
        answer = answer if isinstance(answer, dict) else {"": answer}
        if response.status_code != 200 or answer.get("success") is False:
            raise Refusal(f"{url} answered {response.status_code}: {response.text[:500]}", response.status_code)
        return answer

    def versions(self) -> dict[str, str]:
        """The version that each engine serves; loses those that do not say."""
        answers = self.on_each(lambda url: self.get(url, "/model_info"))
        return {url: str(answer.get("weight_version")) for url, answer in answers.items()}

    # -- membership ----------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Find engines that have come, or were started again: they join; those that leave are let go. A router that was
        started again learns who serves."""
        members = self._members()
        asked = {url: self._pool.submit(self.get, url, "/model_info", PROBE_SECONDS) for url in members}
        answers, _ = self.settle(asked)  # who does not answer may be busy, or dead: the next call of a publish tells
        for url, answer in answers.items():
            label = str(answer.get("weight_version"))
            if not label.isdigit() and self._is_new(url, label):
                self.lose(url, "it was started again")
                self._incarnations[url] = label
                self.join(url)
        if self._router:
            with suppress(EngineError):  # a router that is dead is started again, and learns it then
                self._router.keep([url for url in self.serving if url in answers])

    def _members(self) -> list[str]:
        """Who may serve. The others are let go."""
        if self._register is None:
            return list(self._configured)
        joined, leaving = self._register.joined(), self._register.leaving()
        members = [url for url in dict.fromkeys((*self._configured, *joined)) if url not in leaving]
        for url in self.urls:
            if url not in members:
                self.lose(url, "it leaves" if url in leaving else "whoever started it has not renewed its lease")
        for url in leaving:
            self._register.let_go(url)
        return members

    def _is_new(self, url: str, label: str) -> bool:
        """Whether an engine that has no weights of the run has begun to be so. Nobody starts an attached one again:
        what it failed of may have passed."""
        if url in self.serving:
            return True
        if url in self.joining and url not in self._incarnations:
            return False  # attached, and not seen before
        return self._incarnations.get(url) != label or (url in self._attached and url not in self.joining)

    def needs_weights(self) -> bool:
        """Whether nobody serves, but engines that were started again would: without weights no batch will come."""
        self.reconcile()
        return bool(self.joining and not self.serving)

    def join(self, url: str) -> None:
        """An engine that started: it gets the next publish, and serves once its checksum is confirmed."""
        self.lost.pop(url, None)
        if url not in self.urls:
            self.joining.append(url)
            self.changes += 1

    def admit(self) -> None:
        """Those that joined hold the weights: requests may go to them."""
        for url in list(self.joining):
            self.joining.remove(url)
            self.serving.append(url)
            if self._router:
                with suppress(EngineError):  # a router that is being started again learns it from `reconcile`
                    self._router.add(url)

    def lose(self, url: str, reason: str) -> None:
        """Take an engine out. Raises EngineError when it was the last one and none comes back.

        Its requests come back aborted, to be asked again elsewhere: what it holds is not known.
        """
        if url not in self.urls:
            return
        for group in (self.serving, self.joining):
            if url in group:
                group.remove(url)
        self.lost[url] = reason
        self.changes += 1
        if self._router:
            print(f"asyncrl: engine {url} is out of the fleet: {reason}", file=sys.stderr, flush=True)
            try:
                self._router.remove(url)
            except EngineError:
                if self._on_lost is None:  # else the launcher sees to it before it starts the engine again
                    raise
            self._pool.submit(self._let_go, url)
        if self._on_lost:
            self._on_lost(url, self._incarnations.get(url, ""), reason)
        elif not self.serving:
            raise EngineError("no engine is left: " + "; ".join(self.lost.values()))

    def _let_go(self, url: str) -> None:
        with suppress(EngineError):  # one that is dead or hangs: its connections end, or reach the client's deadline
            for mode in ("retract", "abort"):  # a frozen batch is never aborted, but its requests are once they wait
                self.post(url, "/pause_generation", {"mode": mode}, PROBE_SECONDS)

    def lose_the_dead(self) -> None:
        """Ask every engine's scheduler whether it lives; loses those that do not say so in time."""
        self.on_each(lambda url: self.get(url, "/server_info", PROBE_SECONDS))

    def adopt(self, serving: Sequence[str], joining: Sequence[str], changes: int) -> None:
        """Take over rank 0's view; an engine that was lost before may be among them again."""
        self.serving, self.joining, self.lost = list(serving), list(joining), {}
        self.changes = changes

    def close(self) -> None:
        """End the connections and threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()
