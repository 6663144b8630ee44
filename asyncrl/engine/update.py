"""One update of the fleet's weights, from pause to continue: the protocol around the bytes.

    pause      in_place: requests freeze and keep their KV cache; retract: they go back to the queue and are prefilled
               anew under the new weights; abort: they return unfinished, and the client asks for the rest; drain:
               the rollout side has waited until there are none
    flush      not in_place: the caches of the old weights go
    begin      SGLang 0.5.21 and later; earlier servers know no session (404) and need none. A session that a dead
               trainer left open is closed first
    (bytes)
    end        post-processing in the engine
    (verify)   checksums, when they are due
    version    once, after the last byte, and confirmed by every engine
    continue   and the router sends requests to those that joined

On an error the engines stay paused: nobody samples from weights that nobody vouches for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.engine.control import Answer, Fleet, Refusal
from asyncrl.errors import DeadlineExceeded

FLUSH_PAUSE = 0.05


@dataclass
class Pause:
    """How long the engines stood still for an update."""

    began: float
    seconds: float = 0.0


class Update:
    """How this run updates its engines; knows which of them have no sessions."""

    def __init__(self, fleet: Fleet, *, mode: str) -> None:
        self._fleet = fleet
        self._mode = "retract" if mode == "drain" else mode  # nothing is left to retract
        self._sessionless: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Engines stand still in this block; they go on at its end, but not after an error."""
        self._fleet.call("/pause_generation", {"mode": self._mode})  # each scheduler obeys between two steps
        pause = Pause(began=time.monotonic())
        if self._mode != "in_place":
            self._fleet.on_each(self._flush)
        yield pause
        self._fleet.call("/continue_generation")
        pause.seconds = time.monotonic() - pause.began
        self._fleet.admit()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Weights may be sent in this block."""
        self._fleet.on_each(self._begin)
        yield
        self._fleet.on_each(self._end)

    def label(self, version: int) -> None:
        """Give the weights their version, once all are there. Engines that do not confirm it are lost."""
        self._fleet.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        for url, served in self._fleet.versions().items():
            if served != str(version):
                self._fleet.lose(url, f"{url} reports version {served} after version {version} was published")

    def _flush(self, url: str) -> Answer:
        """Refused while an aborted or retracted request is still being put away."""
        deadline = time.monotonic() + self._fleet.timeout
        while True:
            try:
                return self._fleet.post(url, "/flush_cache")
            except Refusal as refusal:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{url} to flush its cache", self._fleet.timeout, str(refusal)) from None
            time.sleep(FLUSH_PAUSE)

    def _begin(self, url: str) -> Answer:
        if url in self._sessionless:
            return {}
        try:
            return self._fleet.post(url, "/begin_weight_update")
        except Refusal as refusal:
            if refusal.status == 404:
                self._sessionless.add(url)
                return {}
        self._fleet.post(url, "/end_weight_update")  # a trainer that died left its session open
        return self._fleet.post(url, "/begin_weight_update")

    def _end(self, url: str) -> Answer:
        return {} if url in self._sessionless else self._fleet.post(url, "/end_weight_update")
