"""How many episodes may be in play at once: enough to keep every engine and the trainer busy, and no more.

Too few leave engines idle. Too many make them prefill again what they had computed: requests that a full cache throws
out, turns of an episode whose cache others took; and where the trainer is the slower side they only grow stale in the
buffer. Two limits, of which the lower holds, and neither needs a number from the user:

    engines   grows while some engine has room and an empty queue, as a congestion window does: doubling each time that
              the episodes in play have been replaced, later by a quarter (slow start and congestion avoidance, RFC
              5681); falls when engines spend their time on prefilling again, or when all of them have long queues;
              once for the episodes in play, for the effect is seen when they have ended
    trainer   falls while whole batches lie ready beyond the one that the trainer took, grows when it had to wait

The buffer's admission (rollout.lead) bounds what is in play in any case. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.engine.loads import Load

ROOMY = 0.9
"""Share of its cache in use below which an engine takes more."""
WASTED, MEMORY = 0.25, 0.9
"""Share of the engines' time that they may spend on prefilling again, and how much of an observation's weight the next
one has: bursts are seen over ten."""
PATIENCE = 3
"""Observations in a row for which queues must persist: a burst of new requests waits to be prefilled."""
BOLD, CAREFUL = 1.0, 0.25
"""Growth while the episodes in play are replaced once: at first, and since every engine was once full."""
FEWER, MORE = 0.8, 1.5
"""Limits of one step."""
RESERVE = 2.0
"""Batches that lie ready when the trainer has taken one."""


class Window:
    """The controller. `start`, `end`, `observe` and `taken` tell it what happens."""

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of the longest episode; as many as fit for certain may start at once."""
        self._longest = longest
        self.in_play = 0
        self.cuts = 0
        self.engines = 0.0  # not known until engines were asked
        self.trainer = math.inf
        self.wasted = 0.0
        self._growth = BOLD
        self._seen: list[Load] = []
        self._queued = self._ended = 0
        self._untouched = 0  # episodes that are still to end before the next cut
        self._starved = False

    @property
    def limit(self) -> float:
        """Episodes that may be in play."""
        return min(self.engines, self.trainer)

    def may_start(self, episodes: int) -> bool:
        """Whether a group of so many may; one is always in play."""
        return self.in_play == 0 or self.in_play + episodes <= self.limit

    def start(self, episodes: int) -> None:
        """A group starts."""
        self.in_play += episodes

    def end(self, episodes: int) -> None:
        """A group has ended."""
        used_up = self.in_play + episodes > self.engines
        self.in_play -= episodes
        self._ended += 1
        self._untouched = max(0, self._untouched - episodes)
        if used_up and self._starved:
            self.engines += self._growth * episodes

    def observe(self, loads: Sequence[Load], seconds: float, needed: float) -> None:
        """What the engines say, at regular times but not while they are paused; `seconds` and the tokens that had to be
        prefilled since the last time."""
        if not loads:
            return
        if self.engines == 0:
            self.engines = max(1.0, sum(load.capacity for load in loads) / self._longest)
        self._starved = any(load.waiting == 0 and load.used < ROOMY * load.capacity for load in loads)
        if not self._starved:
            self._growth = CAREFUL
        wasted = self._waste(loads, needed) / max(1e-9, seconds * len(loads))
        self.wasted = MEMORY * self.wasted + (1 - MEMORY) * wasted
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        queues = waiting > running and all(load.waiting for load in loads)
        self._queued = self._queued + 1 if queues else 0
        if self.wasted > WASTED:
            self._growth = CAREFUL
            self._cut(FEWER)
        elif self._queued >= PATIENCE:
            self._cut(2 * running / (waiting + running))

    def open(self) -> None:
        """The engines do not tell their load: let the trainer's side alone decide."""
        self.engines = math.inf

    def _waste(self, loads: Sequence[Load], needed: float) -> float:
        """Seconds that engines spent on prefilling again, in sum."""
        before, self._seen = self._seen, list(loads)
        if len(before) != len(loads):
            return 0.0  # an engine came or went; one that was started again counts from 0
        same = [(then, now) for then, now in zip(before, loads, strict=True) if then.prefilled <= now.prefilled]
        tokens = sum(now.prefilled - then.prefilled for then, now in same)
        spent = sum(now.prefill_seconds - then.prefill_seconds for then, now in same)
        return spent * max(0.0, 1.0 - needed / tokens) if tokens > 0 else 0.0

    def _cut(self, share: float) -> None:
        if self._untouched == 0:
            self.engines = max(1.0, min(self.engines, self.in_play) * max(FEWER, share))
            self._untouched = self.in_play // 2
            self.cuts += 1

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """The trainer took a batch of `batch` groups, for which it had to wait or not; `ready` groups are left.

        What ends until the next is in proportion to what is in play: as much as leaves RESERVE batches then.
        """
        ended, self._ended = self._ended, 0
        if waited or ready < batch or not ended:
            self.trainer = math.inf if self.trainer * MORE > self.engines else self.trainer * MORE
        else:
            share = ((1 + RESERVE) * batch - ready) / ended
            self.trainer = max(1.0, min(self.trainer, self.in_play) * min(MORE, max(FEWER, share)))
