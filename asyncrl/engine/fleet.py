"""Which engines serve, and which wait for their weights. An engine that fails a call (calls.py) is lost: it is removed
from the fleet and from the router, and the others go on. When none is left, the trainer waits for one that is
restarted, or the error ends the run (cluster.on_engine_death=fail).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl import jsonl
from asyncrl.config import Config
from asyncrl.engine.calls import EngineCalls
from asyncrl.engine.registry import Registry
from asyncrl.engine.router import RouterWorkers
from asyncrl.errors import EngineError
from asyncrl.network.addresses import LOST, Access, Addresses

PROBE_SECONDS = 5.0
"""Deadline of a liveness probe, and of aborting the requests of an engine that has left the fleet."""


class Fleet(EngineCalls):
    """The engines of a run as one trainer rank sees them: those that serve and those that wait for their weights.

    Only rank 0 has `router` and `register`, and decides which engines serve. Other ranks send weights and report
    the engines that they lost. `attached` engines were started by others, and wait for their weights at first.
    `selector` says which of an engine's models receive weights: the "target", or "all", with its draft model.
    `on_lost` is called with the URL, the incarnation and the reason of every lost engine. With `on_lost`, losing
    the last engine is not an error, because the engine is started again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        access: Access,
        timeout: float,
        *,
        attached: Sequence[str] = (),
        router: RouterWorkers | None = None,
        register: Registry | None = None,
        on_lost: Callable[[str, str, str], None] | None = None,
        selector: str = "all",
    ) -> None:
        super().__init__(access, timeout)
        self.selector = selector
        self._configured, self._attached = (*urls, *attached), set(attached)
        self.serving, self.joining = list(urls), list(attached)
        self.lost: dict[str, str] = {}
        self.changes = 0  # number of joins and losses: the same URLs may be other processes
        self._router = router
        self._register = register
        self._on_lost = on_lost
        self._incarnations: dict[str, str] = {}  # version label of each engine before it got weights of the run

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all engines that receive weights."""
        return (*self.serving, *self.joining)

    @property
    def restarts(self) -> bool:
        """Return whether engines that are lost are started again (cluster.on_engine_death)."""
        return self._on_lost is not None

    def absent(self) -> list[str]:
        """Return the run's own engines that were lost and have not come back."""
        return [url for url in self._configured if url not in self.urls]

    def incarnation(self, url: str) -> str:
        """Return the label with which an engine's process reported for this run; empty for its first process."""
        return self._incarnations.get(url, "")

    def reconcile(self) -> None:
        """Update the fleet: new and restarted engines join, and leaving engines are released.

        A router that was restarted is told which engines serve.
        """
        members = self._members()
        asked = self.begin(lambda url: self.get(url, "/model_info", PROBE_SECONDS), members)
        answers, _ = self.settle(asked)  # no answer: busy or dead; the next call of a publish finds out
        for url, answer in answers.items():
            label = str(answer.get("weight_version"))
            if not label.isdigit() and self._is_new(url, label):
                self.lose(url, "it was restarted", restarted=True)
                self._incarnations[url] = label
                self.join(url)
        if self._router:
            with suppress(EngineError):  # a dead router is restarted, and told about them then
                self._router.keep([url for url in self.serving if url in answers])

    def inherit(self) -> None:
        """Add the engines that joined the run, and serve, before this process took its fleet over from one that died.
        Those that others started serve if the router knows them."""
        if self._router and self.joining:
            with suppress(EngineError):
                routed = self._router.listed()
                self.serving += [url for url in self.joining if url in routed]
                self.joining = [url for url in self.joining if url not in routed]
        for url in self._members():
            if url not in self.urls:
                with suppress(EngineError):
                    if str(self.get(url, "/model_info", PROBE_SECONDS).get("weight_version")).isdigit():
                        self.serving.append(url)
                        self.changes += 1

    def _members(self) -> list[str]:
        """Return the URLs of the engines that may serve, and remove the others from the fleet."""
        if self._register is None:
            return list(self._configured)
        joined, leaving = self._register.joined(), self._register.leaving()
        members = [url for url in dict.fromkeys((*self._configured, *joined)) if url not in leaving]
        for url in self.urls:
            if url not in members:
                self.lose(url, "it leaves" if url in leaving else "its lease was not renewed")
        for url in leaving:
            self._register.let_go(url)
        return members

    def _is_new(self, url: str, label: str) -> bool:
        """Return whether an engine without weights of the run is new or was restarted.

        A lost engine that is attached counts as new even with the same label: nobody restarts it, and the cause of its
        failure may have passed.
        """
        if url in self.serving:
            return True
        if url in self.joining and url not in self._incarnations:
            return False  # attached, and not seen before
        return self._incarnations.get(url) != label or (url in self._attached and url not in self.joining)

    def needs_weights(self) -> bool:
        """Return whether no engine serves but some wait for weights. Without weights no batch would ever arrive."""
        self.reconcile()
        return bool(self.joining) and not self.serving

    def join(self, url: str) -> None:
        """Add a started engine. It receives the next publish, and serves once its checksum is confirmed."""
        self.lost.pop(url, None)
        if url not in self.urls:
            self.joining.append(url)
            self.changes += 1

    def admit(self) -> None:
        """Let the engines that joined serve requests, now that they hold the weights."""
        for url in list(self.joining):
            self.joining.remove(url)
            self.serving.append(url)
            if self._router:
                with suppress(EngineError):  # a router that is restarting is told by `reconcile`
                    self._router.add(url)

    def lose(self, url: str, reason: str, *, restarted: bool = False) -> None:
        """Remove an engine from the fleet. Raises EngineError when it was the last one and none is started again.

        Its requests are aborted, and the clients send them to other engines, because its weights are unknown. One that
        was restarted has none, and must not be paused: nothing would let it continue if adapters are published.
        """
        if url not in self.urls:
            return
        for group in (self.serving, self.joining):
            if url in group:
                group.remove(url)
        self.lost[url] = reason
        self.changes += 1
        if self._router:
            print(f"asyncrl: engine {url} left the fleet: {reason}", file=sys.stderr, flush=True)
            try:
                self._router.remove(url)
            except EngineError:
                if self._on_lost is None:  # otherwise the launcher removes it before it restarts the engine
                    raise
            if not restarted:
                self._pool.submit(self._let_go, url)
        if self._on_lost:
            self._on_lost(url, self._incarnations.get(url, ""), reason)
        elif not self.urls:
            raise EngineError("no engine is left: " + "; ".join(self.lost.values()))

    def _let_go(self, url: str) -> None:
        with suppress(EngineError):  # a dead or hung engine: its connections end or time out in the client
            for mode in ("retract", "abort"):  # "abort" skips a frozen batch, so first retract it to the queue
                self.post(url, "/pause_generation", {"mode": mode}, PROBE_SECONDS)

    def adopt(self, serving: Sequence[str], joining: Sequence[str], changes: int) -> None:
        """Adopt rank 0's view of the fleet. It may include engines that this rank has lost before."""
        self.serving = list(serving)
        self.joining = list(joining)
        self.lost = {}
        self.changes = changes


def build_fleet(config: Config, addresses: Addresses, run_dir: Path, *, decides: bool) -> Fleet:
    """Build the fleet of one process.

    Exactly one process `decides`: only it talks to the router, and only it asks the launcher to restart lost engines.
    """
    timeout = config.weights.timeout
    registry = Registry(run_dir)
    router = RouterWorkers(addresses.router, addresses.access, timeout) if decides else None

    def note(url: str, incarnation: str, reason: str) -> None:
        if decides:
            lost = {"engine": url, "incarnation": incarnation, "reason": reason, "time": time.time()}
            jsonl.append(run_dir / LOST, lost)

    restart = config.cluster.on_engine_death == "restart"
    # SGLang would load the policy's layers into the layers of the same names of a draft model
    selector = "target" if "speculative_draft_model_path" in config.engine.server_args else "all"
    return Fleet(
        addresses.engines,
        addresses.access,
        timeout,
        attached=addresses.attached,
        router=router,
        register=registry if decides else None,
        on_lost=note if restart else None,
        selector=selector,
    )
