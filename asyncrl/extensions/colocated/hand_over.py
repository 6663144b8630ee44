"""Hand-over of the GPUs between engines and trainers, which use them in turns (cluster.placement=colocated).

An engine goes through these steps, in this order only. Each is a call that every engine must answer:

    pause             requests are back in its queue, its caches are flushed
    release           weights and KV cache have no memory; the trainers work
    resume weights    the weights have memory again, and undefined bytes
    (load)            every weight is sent again, and the engine confirms the version
    resume cache
    continue

SGLang keeps the model's buffers, such as rotary caches, over a release (`_export_static_state`); parameters are lost.
It asserts that nothing runs when memory is released, and fails if a tag is resumed without a release, so that it must
be known which engines have released theirs. A restarted engine is another incarnation, which has its memory, and
follows the others through all steps. Trainers that start again take no engine for released, whatever those that died
had done with it: the first two steps may be taken again (memory.py).

    waits for     every call, weights.timeout each; engines that are being restarted, engine.start_timeout
    on failure    an engine that fails a call is lost (engine/fleet.py) and restarted. It is not restarted while
                  trainers use the GPUs (the file TRAINING), and trainers do not use them while it starts
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.engine.calls import Answer
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Pause, Update
from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.network.addresses import TRAINING

POLL_SECONDS = 0.5
CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's names (tags) of the memory that an engine releases."""


class HandOver(Update):
    """Update protocol of engines that release their memory, which rank 0 has. Its pause is the trainers' whole turn.

    `mode` is weights.pause_mode. `folder` is the run folder, in which the file TRAINING says whose turn it is.
    """

    def __init__(self, fleet: Fleet, *, mode: str, start_timeout: float, folder: Path) -> None:
        super().__init__(fleet, mode=mode)
        self._start_timeout = start_timeout
        self._training = folder / TRAINING
        self._released: set[tuple[str, str]] = set()  # URL and incarnation
        self._paused_at = 0.0
        self._training.unlink(missing_ok=True)  # of trainers that died in their turn: engines may start until `give`

    def give(self) -> None:
        """Make every engine of the run release its memory, so that the trainers may use the GPUs. Wait for engines that
        are being restarted. Raises DeadlineExceeded, or EngineError if a lost one is not restarted."""
        deadline = time.monotonic() + self._start_timeout
        while absent := self._absent():
            if not self.fleet.restarts:
                lost = "; ".join(self.fleet.lost.values())
                raise EngineError(f"engines that may still use the trainers' GPUs were lost: {lost}")
            if time.monotonic() > deadline:
                what = f"the engines {absent} to start, so that they can release their memory"
                raise DeadlineExceeded(what, self._start_timeout, "see logs/")
            time.sleep(POLL_SECONDS)
        self._training.touch()

    def _absent(self) -> list[str]:
        """Make the engines that are there release their memory, and return the others."""
        self.fleet.reconcile()
        self.release()
        return self.fleet.absent()

    def release(self) -> None:
        """Pause the engines that generate, and make them release their memory; no-op for those that have done so."""
        if generating := [url for url in self.fleet.urls if not self.released(url)]:
            self._paused_at = self._paused_at or time.monotonic()
            paused = self.fleet.on_each(self._idle, generating)
            answers = self.fleet.on_each(lambda url: self._memory(url, "release", CACHE, WEIGHTS), paused)
            self._released |= {(url, self.fleet.incarnation(url)) for url in answers}

    def released(self, url: str) -> bool:
        """Return whether the engine that now serves this URL has neither weights nor cache."""
        return (url, self.fleet.incarnation(url)) in self._released

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Give the engines memory for the weights that are sent in this block. They get their cache and continue at its
        end, but not after an error."""
        self.release()  # engines that joined during the turn
        self.fleet.on_each(lambda url: self._memory(url, "resume", WEIGHTS))
        pause = Pause(began=time.monotonic())
        yield pause
        self.fleet.on_each(lambda url: self._memory(url, "resume", CACHE))
        self.fleet.call("/continue_generation")
        self._released.clear()
        self._training.unlink(missing_ok=True)
        pause.seconds = time.monotonic() - self._paused_at
        self._paused_at = 0.0
        self.fleet.admit()

    def _idle(self, url: str) -> Answer:
        """Pause one engine, and flush its caches, which it refuses until nothing runs."""
        self.fleet.post(url, "/pause_generation", {"mode": self._mode})
        return self._flush(url)

    def _memory(self, url: str, verb: str, *tags: str) -> Answer:
        return self.fleet.post(url, f"/{verb}_memory_occupation", {"tags": list(tags)})
