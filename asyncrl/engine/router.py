"""Command line of the router (the package `smg`), and registration of its workers through its API.

`python -m asyncrl.engine.router ARGUMENTS` starts it, with the run's API key and ports from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from asyncrl.config import EngineConfig
from asyncrl.engine.server import flags
from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.network.addresses import ARGUMENTS, Access, Addresses
from asyncrl.network.tls import Signed

POLL_SECONDS = 0.2
REMOVAL_SECONDS = 0.05
LISTED_SECONDS = 10.0
"""Seconds within which the router lists a worker that was added, or forgets one that was removed."""
KEY_SECONDS = 3600
"""Seconds for which the router remembers the engine of an idle group."""
UNREACHABLE = "224.0.0.1"
"""Address of the router's own metrics, which it would serve to anyone, and which it cannot be told not to serve. The
kernel binds a multicast address, and lets nobody connect to one."""
ACCEPTED = (200, 201, 202, 409)
"""Status codes of success. 409 means that the router is already adding this engine."""


def router_argv(engine: EngineConfig, url: str, metrics_port: int, signed: Signed | None = None) -> list[str]:
    """Return the router's command line.

    Retries are left to the client: if the router retried, it would hide duplicates and reasons from the client.
    """
    address = urlsplit(url)
    arguments: dict[str, Any] = {
        "host": address.hostname,
        "port": address.port,
        "policy": engine.router_policy,
        "assignment_mode": "min_load",
        "max_idle_secs": KEY_SECONDS,
        "prometheus_host": UNREACHABLE,
        "prometheus_port": metrics_port,
        "worker_startup_check_interval": 1,
        "health_check_interval_secs": 5,
        "health_check_timeout_secs": 30,  # a dead engine refuses the connection at once; a busy machine may be slow
        "request_timeout_secs": int(engine.request_timeout),
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "max_concurrent_requests": 0,  # no limit: by default it answers 429 once 4,096 requests are in flight
        "disable_worker_overload_protection": True,  # long queues are normal, and other engines lack the cache
        "worker_wedge_secs": KEY_SECONDS,  # an engine that is paused for an update generates nothing
        "disable_load_monitoring": True,
        "sse_keepalive_secs": 0,  # keepalive comments are not events of /generate
        # a busy client that opens 10,000 connections may need more than the default 30 s for its first request
        "header_read_timeout_secs": 0,
        "disable_tokenizer_autoload": True,  # requests and answers are token ids
        "history_backend": "none",
        "log_level": "warn",
    }
    if signed:  # its own certificate, and the authority that signed the engines' certificates
        arguments |= {"tls_cert_path": signed.server, "tls_key_path": signed.server, "ca_cert_paths": signed.authority}
    return [sys.executable, "-m", "asyncrl.engine.router", *flags(arguments)]


SHOWN = 4
"""Number of engines that a message names."""


def _worker(url: str, api_key: str) -> dict[str, Any]:
    """Return the body of POST /workers.

    Without `drain_settle_secs` a deleted worker stays in the list for 5 s, and a worker that is added again within that
    time is deleted nevertheless. Its open requests finish either way.
    """
    health = {"drain_settle_secs": 0}
    return {"url": url, "api_key": api_key, "runtime_type": "sglang", "worker_type": "regular", "health": health}


async def register(http: httpx.AsyncClient, engine_url: str, api_key: str) -> None:
    """Add one engine to the router's workers. The router accepts it at once and checks its health itself."""
    response = await http.post("/workers", json=_worker(engine_url, api_key))
    if response.status_code not in ACCEPTED:
        raise EngineError(f"the router refused the engine {engine_url}: {response.status_code} {response.text[:300]}")


class RouterWorkers:
    """The router's list of workers, which the trainer changes while the run goes on.

    The router lists a worker only after it has asked it for its properties, and ignores a deletion before that.
    """

    def __init__(self, router: str, access: Access, timeout: float) -> None:
        self._api_key = access.key
        self._awaited, self._unwanted = set[str](), set[str]()  # added and not yet listed; removed and not yet gone
        self._http = httpx.Client(
            base_url=router,
            **access.http,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def add(self, url: str) -> None:
        """Add this engine. The router sends it requests once it finds it healthy."""
        self._unwanted.discard(url)
        self._awaited.add(url)
        self._request("POST", "/workers", json=_worker(url, self._api_key))

    def remove(self, url: str) -> None:
        """Stop routing requests to this engine, and wait until the router has forgotten it. No-op for an engine that
        the router does not know. If the wait takes too long, `keep` removes the engine."""
        deadline = time.monotonic() + LISTED_SECONDS
        self._unwanted.add(url)
        deleted: set[str] = set()
        while (worker := self.listed().get(url)) or url in self._awaited:
            if worker and worker not in deleted:
                self._request("DELETE", f"/workers/{worker}", gone=True)
                deleted.add(worker)
                self._awaited.discard(url)
            elif time.monotonic() > deadline:
                return
            else:
                time.sleep(REMOVAL_SECONDS)
        self._unwanted.discard(url)

    def keep(self, urls: Sequence[str]) -> None:
        """Add those of these engines that the router does not know because it was restarted, and remove those that it
        has listed after their removal."""
        if urls or self._unwanted:
            known = self.listed().keys()
            self._awaited -= known
            for url in self._unwanted & known:
                self.remove(url)
            for url in urls:
                if url not in known:
                    self.add(url)

    def listed(self) -> dict[str, str]:
        """Return the number of each worker, by URL."""
        workers = self._request("GET", "/workers").json().get("workers", [])
        return {str(worker.get("url")): str(worker["id"]) for worker in workers}

    def _request(self, method: str, path: str, *, gone: bool = False, **content: Any) -> httpx.Response:
        """Send a request. With `gone`, an unknown worker is no error."""
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):  # it has ended, and will know none
                self._awaited.clear()
            raise EngineError(f"the router does not answer {path}: {type(error).__name__} {error}") from None
        if response.status_code not in ACCEPTED and not (gone and response.status_code == 404):
            raise EngineError(f"the router refused {method} {path}: {response.status_code} {response.text[:300]}")
        return response


async def wait_until_ready(
    addresses: Addresses, timeout: float, *, attached: bool = False, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Register the engines as they come up, and wait until the router routes to all. Raises DeadlineExceeded.

    With `attached`, also wait for the engines that others started. Use this only when no trainer has to send them
    weights first. `tell` is told repeatedly what is waited for.
    """
    began = time.monotonic()
    deadline = time.monotonic() + timeout
    engines = (*addresses.engines, *(addresses.attached if attached else ()))
    waiting = set(engines)
    async with httpx.AsyncClient(base_url=addresses.router, timeout=10.0, **addresses.access.http) as router:
        while True:
            if await answers(router, f"{addresses.router}/health"):
                for url in [url for url in waiting if await answers(router, f"{url}/health")]:
                    await register(router, url, addresses.api_key)
                    waiting.discard(url)
                if not waiting and await _healthy_workers(router) >= len(engines):
                    return
            missing = [f"engine {number}" for number, url in enumerate(engines) if url in waiting]
            named = ", ".join([*missing[:SHOWN], *(["..."] if len(missing) > SHOWN else [])])
            does = f"{named} to load weights" if missing else "the router to find the engines healthy"
            tell(f"{does}, {time.monotonic() - began:.0f} s")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{len(engines)} engines behind the router",
                    timeout,
                    f"not yet up: {sorted(waiting) or 'the router'}; see logs/",
                )
            await asyncio.sleep(POLL_SECONDS)


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    """Return whether a server answers with 200."""
    try:
        return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False  # not listening yet


async def _healthy_workers(router: httpx.AsyncClient) -> int:
    """Return how many engines the router finds healthy: none while it is too busy to answer."""
    try:
        workers = (await router.get("/workers")).json().get("workers", [])
    except httpx.TransportError:
        return 0
    return sum(bool(worker.get("is_healthy")) for worker in workers)


if __name__ == "__main__":
    # This does the same as smg.launch_router, without its banner in the log.
    import setproctitle
    from smg.router import Router
    from smg.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    sys.argv += shlex.split(os.environ.get(ARGUMENTS, ""))
    if key := os.environ.get("ASYNCRL_API_KEY"):
        sys.argv += ["--api-key", key]
    arguments = RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)
    setproctitle.setproctitle("smg::router")
    Router.from_args(arguments).start()
