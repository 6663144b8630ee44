"""Batches for every rank, and the words that rank 0 exchanges with the rollout process.

waits for     the rollout service's /batch (rank 0), then rank 0's broadcast (the others)
deadline      rollout.batch_timeout, owned by rank 0; the process group's timeout lies above it
on death      a closed connection raises EngineError here, and a collective's error on the others
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import httpx
import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.parallel import Parallel
from asyncrl.types import Batch, decode_batch


class Door(Protocol):
    """Where batches come from, and who is told what becomes of them."""

    def batch(self, version: int, *, interrupt: Callable[[], bool]) -> bytes:
        """The encoded batch that turns `version` into the next, or nothing where `interrupt` said so."""
        ...

    def hold(self) -> None:
        """Keep new requests back: weights are about to change."""
        ...

    def announce(self, version: int, reused: int = 0) -> None:
        """Every engine serves `version`; `reused` groups were trained more than once so far."""
        ...

    def evaluate(self, timeout: float) -> list[dict[str, Any]]:
        """Answer the held-out questions now: a line of eval.jsonl for every set."""
        ...

    def status(self) -> dict[str, Any]:
        """The ledger, and what the rollout side waits for."""
        ...


class RolloutDoor:
    """The rollout service, as rank 0 sees it."""

    def __init__(self, url: str, headers: dict[str, str], batch_timeout: float) -> None:
        self._batch_timeout = batch_timeout
        limits = httpx.Limits(keepalive_expiry=2.0)  # below uvicorn's 5 s, which would close it under a request
        self._http = httpx.Client(base_url=url, headers=headers, timeout=60.0, limits=limits, trust_env=False)

    def batch(self, version: int, *, interrupt: Callable[[], bool]) -> bytes:
        """The encoded batch that turns `version` into the next; asks again until it is ready, or nothing when
        `interrupt`, which is called between, says so."""
        deadline = time.monotonic() + self._batch_timeout
        reason = "the rollout service has not answered yet"
        while True:
            try:
                response = self._http.get("/batch", params={"version": version})
            except (httpx.NetworkError, httpx.RemoteProtocolError):  # it may not listen yet, or broke off: a batch is
                response = None  # kept until its version is published, and the launcher watches the process's life
                time.sleep(0.2)
            except httpx.HTTPError as error:
                raise EngineError(f"the rollout service broke off: {type(error).__name__} {error}") from None
            if response is not None:
                if response.status_code == 200:
                    return response.content
                if response.status_code != 202:
                    raise EngineError(f"the rollout service answered {response.status_code}: {response.text[:500]}")
                reason = response.text
            if interrupt():
                return b""
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"batch {version}", self._batch_timeout, reason)

    def hold(self) -> None:
        """Keep new requests back; with weights.pause_mode=drain, until those in flight are answered."""
        deadline = time.monotonic() + self._batch_timeout
        while (response := self._ask("POST", "/hold")).status_code == 202:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "the answers in flight (weights.pause_mode=drain)", self._batch_timeout, response.text
                )

    def announce(self, version: int, reused: int = 0) -> None:
        """Every engine serves `version`; `reused` groups were trained more than once so far."""
        self._ask("POST", "/version", {"version": version, "reused": reused})

    def evaluate(self, timeout: float) -> list[dict[str, Any]]:
        """Answer the held-out questions now: a line of eval.jsonl for every set."""
        return list(self._ask("POST", "/evaluate", timeout=timeout).json())

    def status(self) -> dict[str, Any]:
        """The ledger, and what the rollout side waits for."""
        return dict(self._ask("GET", "/status").json())

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineError(f"the rollout service did not answer {path}: {type(error).__name__} {error}") from None
        if response.status_code not in (200, 202):
            raise EngineError(f"the rollout service answered {path} with {response.status_code}: {response.text[:500]}")
        return response


class Batches:
    """The same batch on every rank: rank 0 fetches the bytes once, and broadcasts them."""

    def __init__(self, door: Door | None, interrupt: Callable[[], bool], parallel: Parallel) -> None:
        self._door, self._interrupt, self._parallel = door, interrupt, parallel

    def get(self, version: int) -> Batch | None:
        """Blocks until batch `version` is there. None when `interrupt`, asked on rank 0, says that none will come."""
        data = self._door.batch(version, interrupt=self._interrupt) if self._door else b""
        data = self._broadcast(data) if dist.get_world_size() > 1 else data
        if not data:
            return None
        batch = decode_batch(data)
        assert batch.version == version, f"asked for batch {version}, received {batch.version}"
        return batch

    def _broadcast(self, data: bytes) -> bytes:
        device = self._parallel.device
        size = torch.tensor(len(data), device=device)
        dist.broadcast(size, src=0)
        if int(size) == 0:
            return b""
        if self._parallel.is_first:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        else:
            payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(payload, src=0)
        return payload.cpu().numpy().tobytes()
