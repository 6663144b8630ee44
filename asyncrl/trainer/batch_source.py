"""Sources of batches on the trainers' side: the client of the rollout process's server. Whoever takes batches without
training has one, too, and no torch.

waits for     the server's /batch and /hold
deadline      rollout.batch_timeout
on failure    a server that does not listen, breaks the connection, is silent or reports an error of its own has died or
              will: a new one takes its place, or the launcher ends the run. Requests are repeated until their deadline.
              One that the server refuses raises PeerFailed
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from asyncrl.engine.served import InUse
from asyncrl.engine.update import RolloutSide
from asyncrl.errors import DeadlineExceeded, PeerFailed
from asyncrl.network.addresses import Access

RETRY_SECONDS = 0.2


class BatchSource(RolloutSide, ABC):
    """Source of batches, which is also told which versions are served. It has no rollout side, unless a subclass
    does."""

    first: int = 0
    """Version that a run begins with."""
    end: int | None = None
    """Version after the last batch; None if there is no last one."""

    @abstractmethod
    def batch(self, version: int, part: int = 0, parts: int = 1, *, interrupt: Callable[[], bool]) -> bytes:
        """Return the encoded batch that turns `version` into the next, or its part number `part` of `parts`; nothing if
        `interrupt` returns True."""

    def evaluate(self, interrupt: Callable[[], bool]) -> list[dict[str, Any]] | None:
        """Evaluate on the held-out questions now. Returns one line of eval.jsonl per set; None if interrupted."""
        return []

    def snapshot(self, version: int) -> bytes:
        """Return the state of the rollout side between this version and its batch."""
        return b""

    def status(self) -> dict[str, Any]:
        """Return the ledger, and what the rollout side waits for."""
        return {"ledger": None, "restarts": 0}


class RolloutClient(BatchSource):
    """HTTP client of the rollout server, used by rank 0."""

    def __init__(self, url: str, access: Access, batch_timeout: float) -> None:
        self._batch_timeout = batch_timeout
        limits = httpx.Limits(keepalive_expiry=2.0)  # below uvicorn's 5 s, so that it closes none during a request
        self._http = httpx.Client(base_url=url, timeout=60.0, limits=limits, **access.http)

    def batch(self, version: int, part: int = 0, parts: int = 1, *, interrupt: Callable[[], bool]) -> bytes:
        """Return a batch, or its part, once it is ready. `interrupt` is called between requests."""
        what = f"batch {version}" if parts == 1 else f"part {part} of batch {version}"
        return self._wait(what, "GET", "/batch", interrupt, params={"version": version, "part": part, "parts": parts})

    def hold(self) -> None:
        """Hold back new requests. With weights.pause_mode=drain, wait until those in flight are answered."""
        self._wait("the answers in flight (weights.pause_mode=drain)", "POST", "/hold")

    def announce(self, version: int) -> InUse:
        """Announce that every engine serves `version`. Returns what they must keep."""
        what = f"all processes to learn of version {version}"
        told = self._wait(what, "POST", "/version", longest=self._batch_timeout, json={"version": version})
        return msgspec.json.decode(told, type=InUse)

    def evaluate(self, interrupt: Callable[[], bool]) -> list[dict[str, Any]] | None:
        """Evaluate on the held-out questions now. Returns one line of eval.jsonl per set, as `batch` returns one."""
        lines = self._wait("an evaluation", "POST", "/evaluate", interrupt)
        return list(msgspec.json.decode(lines)) if lines else None

    def snapshot(self, version: int) -> bytes:
        """Return the state of the rollout side between this version and its batch."""
        what = f"the rollout state at version {version}"
        return self._wait(what, "POST", "/snapshot", longest=self._batch_timeout, json={"version": version})

    def status(self) -> dict[str, Any]:
        """Return the ledger, and what the rollout side waits for."""
        return dict(msgspec.json.decode(self._wait("the status of the rollout process", "GET", "/status")))

    def _wait(
        self,
        what: str,
        method: str,
        path: str,
        interrupt: Callable[[], bool] = lambda: False,
        longest: float = 60.0,
        **content: Any,
    ) -> bytes:
        """Repeat a request, which may take `longest` seconds each time, until it is answered with 200, and return its
        content; nothing if `interrupt`, which is called in between, returns True. Raises PeerFailed if refused."""
        deadline = time.monotonic() + self._batch_timeout
        while True:
            left = max(1.0, deadline - time.monotonic())
            try:
                response = self._http.request(method, path, timeout=min(longest, left), **content)
                if response.status_code == 200:
                    return response.content
                code, reason = response.status_code, response.text
            except httpx.TransportError as error:
                code, reason = None, f"the rollout server did not answer {path}: {type(error).__name__} {error}"
            if code and code != 202:
                reason = f"the rollout server answered {path} with {code}: {reason[:500]}"
                if code < 500:
                    raise PeerFailed(reason)
            if interrupt():
                return b""
            if time.monotonic() > deadline:
                raise DeadlineExceeded(what, self._batch_timeout, reason)
            if code != 202:  # there is no server, or one with an error
                time.sleep(RETRY_SECONDS)
