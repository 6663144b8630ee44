"""Controller of the number of concurrent episodes: enough to keep every engine and the trainer busy, and no more.

Too few episodes leave engines idle. Too many make engines recompute prefills: a full cache evicts requests, and the
prefix cache of an episode's earlier turns is lost to others. Where the trainer is the slower side, surplus episodes
only grow stale in the buffer. Three limits apply, of which the lowest holds, and none needs a number from the user:

    engines   grows while some engine has room and an empty queue, as a congestion window does: it doubles each time
              the running episodes have been replaced, and later grows by a quarter (slow start and congestion
              avoidance, RFC 5681). It falls when engines spend their time on repeated prefills, or when all of them
              have long queues; once per generation of running episodes, because the effect shows when they have ended
    trainer   falls when whole batches are ready beyond the one that the trainer took, and grows when the trainer
              waited. It falls only after a generation without a wait, that is, once all groups have been trained that
              were outstanding at the last fall or wait: a smaller limit shows in the batches after these
    machine   where each episode starts a program: a few for each core at first. It grows like that of the engines, and
              falls while the machine's cores or its memory are short

The buffer's admission (rollout.lead) bounds the running episodes in any case. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.engine.loads import Load

ROOMY = 0.9
"""Fraction of its cache in use below which an engine accepts more work."""
WASTED, MEMORY, LONG_MEMORY = 0.25, 0.9, 0.97
"""Largest fraction of the engines' time that may go to repeated prefills, and the decay of two moving averages: that of
the time covers ten observations; that of tokens thirty, because a slow engine prefills a request long after it was
sent."""
PATIENCE = 3
"""Number of consecutive observations for which queues must persist: a burst of new requests waits for its prefill."""
BOLD, CAREFUL = 1.0, 0.25
"""Growth per replacement of the running episodes: at first, and after every engine was full once."""
FEWER, MORE = 0.8, 1.5
"""Smallest and largest factor of one adjustment."""
RESERVE = 2.0
"""Target number of ready batches at the time the trainer takes the next one."""

PROGRAMS = 4.0
"""Episodes for each core that may run at first where each starts a program."""
BUSY, SCARCE = 4.0, 0.1
"""Processes for each core that want to run, and free fraction of the memory, beyond which no further program starts."""


class ConcurrencyWindow:
    """The controller. `start`, `end`, `observe` and `taken` report events to it."""

    def __init__(self, longest: int) -> None:
        """`longest` is the token count of the longest episode: as many episodes as certainly fit the caches may start
        at once."""
        self._longest = longest
        self.in_play = 0
        self.cuts = 0
        self.engines = 0.0  # unknown until the first observation
        self.trainer = math.inf
        self.machine = math.inf  # until `observe_machine` is called
        self._crowded = False
        self.wasted = 0.0
        self._prefilling = self._prefilled = self._needed = 0.0  # share of the time, tokens, and those needed: averages
        self._growth = BOLD
        self._seen: list[Load] = []
        self._queued = self._ended = self._groups = 0
        self._untouched = 0  # episodes that must end before the next cut
        self._untrained = 0  # groups that must be trained before the trainer's limit may fall
        self._starved = False

    @property
    def limit(self) -> float:
        """Maximum number of running episodes."""
        return min(self.engines, self.trainer, self.machine)

    def may_start(self, episodes: int) -> bool:
        """Return whether a group of so many episodes may start; one group always may."""
        return self.in_play == 0 or self.in_play + episodes <= self.limit

    def start(self, episodes: int) -> None:
        """Record that a group has started."""
        self.in_play += episodes
        self._groups += episodes > 0  # a negative number is what a group does not need

    def end(self, episodes: int) -> None:
        """Record that a group has ended."""
        used_up, machine_used_up = (self.in_play + episodes > limit for limit in (self.engines, self.machine))
        self.in_play -= episodes
        self._ended += 1
        self._groups -= 1
        self._untouched = max(0, self._untouched - episodes)
        if used_up and self._starved:
            self.engines += self._growth * episodes
        if machine_used_up and not self._crowded:
            self.machine += CAREFUL * episodes

    def observe(self, loads: Sequence[Load], seconds: float, needed: float) -> None:
        """Process the engines' loads, at regular intervals but not while the engines are paused.

        `seconds` is the time since the last observation, `needed` the tokens that had to be prefilled in that time.
        """
        if not loads:
            return
        if self.engines == 0:
            self.engines = max(1.0, sum(load.capacity for load in loads) / self._longest)
        self._starved = any(load.waiting == 0 and load.used < ROOMY * load.capacity for load in loads)
        if not self._starved:
            self._growth = CAREFUL
        if prefills := self._prefills(loads):
            spent, tokens = prefills
            self._prefilling += (1 - MEMORY) * (spent / max(1e-9, seconds * len(loads)) - self._prefilling)
            self._prefilled += (1 - LONG_MEMORY) * (tokens - self._prefilled)
            self._needed += (1 - LONG_MEMORY) * (needed - self._needed)
        repeated = max(0.0, 1.0 - self._needed / self._prefilled) if self._prefilled else 0.0
        self.wasted = self._prefilling * repeated
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        queues = waiting > running and all(load.waiting for load in loads)
        self._queued = self._queued + 1 if queues else 0
        if self.wasted > WASTED:
            self._growth = CAREFUL
            self._cut(FEWER)
        elif self._queued >= PATIENCE:
            self._cut(2 * running / (waiting + running))

    def observe_machine(self, cores: int, load: float, free: float) -> None:
        """Process the state of the machine that runs the episodes' programs: how many processes want one of its
        `cores`, and which fraction of its memory is free."""
        if self.machine == math.inf:
            self.machine = PROGRAMS * cores
        self._crowded = load > BUSY * cores or free < SCARCE
        if self._crowded and self._untouched == 0:
            self.machine = max(1.0, min(self.machine, self.in_play) * FEWER)
            self._untouched = self.in_play // 2
            self.cuts += 1

    def open(self) -> None:
        """Let the trainer's limit alone decide: the engines do not report their load."""
        self.engines = math.inf

    def _prefills(self, loads: Sequence[Load]) -> tuple[float, float] | None:
        """Return the seconds that engines spent on prefills since the last observation, and the tokens, summed over
        engines; None if an engine joined or left. One that was restarted counts from 0."""
        before, self._seen = self._seen, list(loads)
        if len(before) != len(loads):
            return None
        same = [(then, now) for then, now in zip(before, loads, strict=True) if then.prefilled <= now.prefilled]
        spent = sum(now.prefill_seconds - then.prefill_seconds for then, now in same)
        return spent, sum(now.prefilled - then.prefilled for then, now in same)

    def _cut(self, share: float) -> None:
        if self._untouched == 0:
            self.engines = max(1.0, min(self.engines, self.in_play) * max(FEWER, share))
            self._untouched = self.in_play // 2
            self.cuts += 1

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        """Adjust the trainer's limit: it took a batch of `batch` groups, `ready` groups are left, and it waited or not.

        The number of groups that end before the next batch is proportional to the number running: scale the limit such
        that RESERVE batches will be left then.
        """
        ended, self._ended = self._ended, 0
        self._untrained -= batch
        if waited or ready < batch or not ended:
            self.trainer = math.inf if self.trainer * MORE > self.engines else self.trainer * MORE
        elif self._untrained > 0:
            return
        else:
            share = ((1 + RESERVE) * batch - ready) / ended
            self.trainer = max(1.0, min(self.trainer, self.in_play) * min(MORE, max(FEWER, share)))
        self._untrained = self._groups + ready
