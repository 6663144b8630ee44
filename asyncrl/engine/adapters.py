"""The adapters that engines serve with weights.lora=versions: their names, and which of them are in use.

A completion has one adapter from its first to its last token, through retries and failover; with
rollout.adapter_per=episode so has an episode. An adapter is in use until the last of them ends. After a version is
announced, nothing begins to use an older one, so an adapter that is not in use then can be unloaded for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.config import Config

AdapterName = Callable[[int], str | None]
"""Returns the name under which engines serve a version; None is the base without an adapter."""


def adapter_names(config: Config, run_id: str) -> AdapterName | None:
    """Return the names of the adapters of one start of a run; None if the engines serve none.

    SGLang loads an unloaded adapter again when a request names it, from wherever it came, so that a name must never
    mean two adapters. `run_id` is another one at every start. Version 0 is the base itself, because B starts at zero,
    unless the run starts from an adapter.
    """
    if not config.serves_adapters:
        return None
    first = 0 if config.trainer.lora.path else 1
    return lambda version: f"{run_id}-v{version}" if version >= first else None


class AdapterUse:
    """Counts who uses which version's adapter. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()

    def acquire(self, version: int | None) -> None:
        """Count a new user of a version's adapter; no-op for None."""
        if version is not None:
            self._users[version] += 1

    def release(self, version: int | None) -> None:
        """Count a user that has ended; no-op for None."""
        if version is not None:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]

    @contextmanager
    def held(self, version: int | None) -> Iterator[int | None]:
        """Use an adapter inside the block."""
        self.acquire(version)
        try:
            yield version
        finally:
            self.release(version)

    def versions(self) -> list[int]:
        """Return the versions in use."""
        return sorted(self._users)
