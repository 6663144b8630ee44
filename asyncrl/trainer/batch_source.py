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

    def evaluate(self, timeout: float) -> list[dict[str, Any]]:
        """Evaluate on the held-out questions now. Returns one line of eval.jsonl per set."""
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
        """Return the encoded batch that turns `version` into the next, or its part number `part` of `parts`. Asks again
        until it is ready, and returns nothing if `interrupt`, which is called between requests, returns True."""
        deadline = time.monotonic() + self._batch_timeout
        reason = "the rollout server has not answered yet"
        while True:
            response = self._request("GET", "/batch", params={"version": version, "part": part, "parts": parts})
            if isinstance(response, str):
                reason = response
                time.sleep(RETRY_SECONDS)
            elif response.status_code == 200:
                return response.content
            else:
                reason = response.text
            if interrupt():
                return b""
            if time.monotonic() > deadline:
                what = f"batch {version}" if parts == 1 else f"part {part} of batch {version}"
                raise DeadlineExceeded(what, self._batch_timeout, reason)

    def hold(self) -> None:
        """Hold back new requests. With weights.pause_mode=drain, wait until those in flight are answered."""
        deadline = time.monotonic() + self._batch_timeout
        while (response := self._ask("POST", "/hold", deadline=deadline)).status_code == 202:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "the answers in flight (weights.pause_mode=drain)", self._batch_timeout, response.text
                )

    def announce(self, version: int) -> InUse:
        """Announce that every engine serves `version`. Returns what they must keep."""
        body = {"version": version}
        told = self._ask("POST", "/version", body, timeout=self._batch_timeout).content  # until all processes know it
        return msgspec.json.decode(told, type=InUse)

    def evaluate(self, timeout: float) -> list[dict[str, Any]]:
        """Evaluate on the held-out questions now. Returns one line of eval.jsonl per set."""
        return list(self._ask("POST", "/evaluate", timeout=timeout).json())

    def snapshot(self, version: int) -> bytes:
        """Return the state of the rollout side between this version and its batch."""
        return self._ask("POST", "/snapshot", {"version": version}, timeout=self._batch_timeout).content

    def status(self) -> dict[str, Any]:
        """Return the ledger, and what the rollout side waits for."""
        return dict(self._ask("GET", "/status").json())

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 60.0,
        deadline: float | None = None,
    ) -> httpx.Response:
        """Return the answer to a request, which may take `timeout` seconds each time, and is repeated until the
        deadline, by default rollout.batch_timeout from now."""
        deadline = time.monotonic() + self._batch_timeout if deadline is None else deadline
        while True:
            left = max(1.0, deadline - time.monotonic())
            response = self._request(method, path, json=body, timeout=min(timeout, left))
            if not isinstance(response, str):
                return response
            if time.monotonic() > deadline:
                raise PeerFailed(response)
            time.sleep(RETRY_SECONDS)

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response | str:
        """Return the answer to a request, or why it must be repeated. Raises PeerFailed if the server refuses it."""
        try:
            response = self._http.request(method, path, **content)
        except httpx.TransportError as error:
            return f"the rollout server did not answer {path}: {type(error).__name__} {error}"
        told = f"the rollout server answered {path} with {response.status_code}: {response.text[:500]}"
        if response.status_code >= 500:
            return told
        if response.status_code not in (200, 202):
            raise PeerFailed(told)
        return response
