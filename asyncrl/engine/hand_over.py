"""Hand-over of the GPUs between engines and trainers, which use them in turns (cluster.placement=colocated).

An engine goes through these phases, in this order only. Each step is a call that every engine must answer:

    GENERATING  --pause-->           PAUSED     requests are back in its queue, its caches are flushed
    PAUSED      --release-->         RELEASED   weights and KV cache have no memory; the trainers work
    RELEASED    --resume weights-->  EMPTY      the weights have memory again, and undefined bytes
    EMPTY       --load-->            LOADED     every weight was sent again, and the engine confirmed the version
    LOADED      --resume cache-->    READY
    READY       --continue-->        GENERATING

SGLang keeps the model's buffers, such as rotary caches, over a release (`_export_static_state`); parameters are lost.
It asserts that nothing runs when memory is released, and fails if a tag is resumed without a release, so that an
engine's phase must be known. A restarted engine is another incarnation, whose phase is GENERATING: it has its memory,
and follows the others through all steps. Trainers that start again take every engine for GENERATING, too, whatever
those that died had done with it: both steps to RELEASED may be taken again (engine/sglang_hooks.py).

    waits for     every call, weights.timeout each; engines that are being restarted, engine.start_timeout
    on failure    an engine that fails a call is lost (engine/fleet.py) and restarted. It is not restarted while
                  trainers use the GPUs (the file TRAINING), and trainers do not use them while it starts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, StrEnum
from pathlib import Path

from asyncrl.engine.fleet import Answer, Fleet
from asyncrl.engine.update import Pause, Update
from asyncrl.errors import AsyncRLError, DeadlineExceeded, EngineError
from asyncrl.network.addresses import TRAINING

POLL_SECONDS = 0.5
CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's names (tags) of the memory that an engine releases."""


class Phase(StrEnum):
    """State of an engine: what it holds, and whether it generates."""

    GENERATING = "generating"
    PAUSED = "paused"
    RELEASED = "without weights and cache"
    EMPTY = "without weights"
    LOADED = "without cache"
    READY = "ready to continue"


class HandOverStep(Enum):
    """A step in words, the phase that it requires, and the phase that it leads to."""

    PAUSE = ("pause", Phase.GENERATING, Phase.PAUSED)
    RELEASE = ("release", Phase.PAUSED, Phase.RELEASED)
    RESUME_WEIGHTS = ("resume the weights of", Phase.RELEASED, Phase.EMPTY)
    LOAD = ("load", Phase.EMPTY, Phase.LOADED)
    RESUME_CACHE = ("resume the cache of", Phase.LOADED, Phase.READY)
    CONTINUE = ("continue", Phase.READY, Phase.GENERATING)


class OutOfTurn(AsyncRLError):
    """Raised when a step does not apply to the phase of an engine."""


def after(step: HandOverStep, phase: Phase, engine: str) -> Phase:
    """Return the phase after a step. Raises OutOfTurn if the step does not apply to this phase."""
    words, required, then = step.value
    if phase is not required:
        raise OutOfTurn(f"cannot {words} engine {engine}: it is {phase}, and must be {required}")
    return then


class HandOver:
    """The phases of a run's engines, by URL and incarnation, and the calls that change them. Rank 0 has it.

    `mode` is weights.pause_mode. `folder` is the run folder, in which the file TRAINING says whose turn it is.
    """

    def __init__(self, fleet: Fleet, *, mode: str, start_timeout: float, folder: Path) -> None:
        self._fleet, self._start_timeout, self._training = fleet, start_timeout, folder / TRAINING
        self.update = TurnUpdate(fleet, self, mode=mode)
        self._phases: dict[tuple[str, str], Phase] = {}
        self._paused_at = 0.0
        self._training.unlink(missing_ok=True)  # of trainers that died in their turn: engines may start until `give`

    def phase(self, url: str) -> Phase:
        """Return the phase of the engine that now serves this URL."""
        return self._phases.get(self._key(url), Phase.GENERATING)

    def give(self) -> None:
        """Make every engine of the run release its memory, so that the trainers may use the GPUs. Wait for engines that
        are being restarted. Raises DeadlineExceeded, or EngineError if a lost one is not restarted."""
        deadline = time.monotonic() + self._start_timeout
        self._fleet.reconcile()
        self.release()
        while absent := self._fleet.absent():
            if not self._fleet.restarts:
                lost = "; ".join(self._fleet.lost.values())
                raise EngineError(f"engines that may still use the trainers' GPUs were lost: {lost}")
            if time.monotonic() > deadline:
                what = f"the engines {absent} to start, so that they can release their memory"
                raise DeadlineExceeded(what, self._start_timeout, "see logs/")
            time.sleep(POLL_SECONDS)
            self._fleet.reconcile()
            self.release()
        self._training.touch()

    def release(self) -> None:
        """Pause the engines that generate, and make them release their memory; no-op for those that have done so."""
        if generating := self._in(Phase.GENERATING):
            self._paused_at = self._paused_at or time.monotonic()
            self._take(HandOverStep.PAUSE, generating, self.update.idle)
            self._take(HandOverStep.RELEASE, self._in(Phase.PAUSED), self._memory("release", CACHE, WEIGHTS))

    def resume_weights(self) -> None:
        """Give the engines memory for their weights."""
        self._take(HandOverStep.RESUME_WEIGHTS, self._in(Phase.RELEASED), self._memory("resume", WEIGHTS))

    def loaded(self) -> None:
        """Record that the engines confirmed a version after all of its bytes were sent."""
        self._take(HandOverStep.LOAD, self._fleet.urls, lambda url: {})

    def take_back(self) -> float:
        """Give the engines their cache and let them generate. Returns the seconds since the first of them paused."""
        self._take(HandOverStep.RESUME_CACHE, self._fleet.urls, self._memory("resume", CACHE))
        self._take(HandOverStep.CONTINUE, self._fleet.urls, lambda url: self._fleet.post(url, "/continue_generation"))
        self._training.unlink(missing_ok=True)
        paused_at, self._paused_at = self._paused_at, 0.0
        return time.monotonic() - paused_at if paused_at else 0.0

    def _memory(self, verb: str, *tags: str) -> Callable[[str], Answer]:
        return lambda url: self._fleet.post(url, f"/{verb}_memory_occupation", {"tags": list(tags)})

    def _take(self, step: HandOverStep, urls: Sequence[str], call: Callable[[str], Answer]) -> None:
        """Take a step with these engines. Those that do not answer are lost."""
        then = {url: after(step, self.phase(url), url) for url in urls}
        for url in self._fleet.on_each(call, then):
            self._phases[self._key(url)] = then[url]

    def _in(self, phase: Phase) -> list[str]:
        return [url for url in self._fleet.urls if self.phase(url) is phase]

    def _key(self, url: str) -> tuple[str, str]:
        return url, self._fleet.incarnation(url)


class TurnUpdate(Update):
    """Update protocol of engines that have released their memory. Its pause is the trainers' whole turn."""

    def __init__(self, fleet: Fleet, hand_over: HandOver, *, mode: str) -> None:
        super().__init__(fleet, mode=mode)
        self._hand_over = hand_over

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Give the engines memory for the weights that are sent in this block, and let them continue at its end, but
        not after an error."""
        self._hand_over.release()  # engines that joined during the turn
        self._hand_over.resume_weights()
        pause = Pause(began=time.monotonic())
        yield pause
        pause.seconds = self._hand_over.take_back()
        self.fleet.admit()

    def label(self, version: int) -> None:
        """Set the version of the weights; only then may the engines have a cache again."""
        super().label(version)
        self._hand_over.loaded()
