"""The adapters that engines serve with weights.lora=versions: their names, and which of them are in use.

A completion has one adapter from its first to its last token, through retries and failover; with
rollout.adapter_per=episode so has an episode. An adapter is in use until the last of them ends. After a version is
announced, nothing begins to use an older one, so an adapter that is not in use then can be unloaded for good. Roles
may have adapters of their own: a version is the set of all adapters after as many batches. Past versions that play a
role (agents.roles.NAME.past) stay as long as a running episode may have drawn them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from asyncrl.config import Config
from asyncrl.config.roles import POLICY

AdapterName = Callable[[int, str], str | None]
"""Returns the name under which engines serve a version of an adapter; None is the base without an adapter."""


class InUse(msgspec.Struct, frozen=True):
    """The answer to the announcement of a version: what engines must keep."""

    versions: list[int]
    """Versions in use, with all their adapters."""
    past: dict[str, list[int]]
    """Past versions that play roles, by adapter."""


def adapter_names(config: Config, run_id: str) -> AdapterName | None:
    """Return the names of the adapters of one start of a run; None if the engines serve none.

    SGLang loads an unloaded adapter again when a request names it, from wherever it came, so that a name must never
    mean two adapters. `run_id` is another one at every start. Version 0 is the base itself, because B starts at zero,
    unless the run starts from an adapter.
    """
    if not config.serves_adapters:
        return None
    first = 0 if config.trainer.lora.path else 1

    def name(version: int, adapter: str) -> str | None:
        if version < first:
            return None
        return f"{run_id}-v{version}" if adapter == POLICY else f"{run_id}-{adapter}-v{version}"

    return name


PastVersions = Callable[[int], dict[str, list[int]]]
"""Returns the past versions of each adapter that episodes may use while a version is the newest (Config.past_versions).
"""


def no_past(version: int) -> dict[str, list[int]]:
    """Return no past version."""
    return {}


class AdapterUse:
    """Counts who uses which version's adapters. Not thread-safe: one event loop owns it."""

    def __init__(self, past_versions: PastVersions = no_past) -> None:
        self._users: Counter[int] = Counter()
        self._past = past_versions

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

    def in_use(self, newest: int) -> InUse:
        """Return what engines must keep while `newest` is the newest version. An evaluation plays roles of past
        versions with the newest one of the version that it began with, which may be older than any episode's."""
        past = {adapter: set(versions) for adapter, versions in self._past(newest).items()}
        for version in self._users:
            for adapter, versions in self._past(version).items():
                past[adapter].add(versions[-1])
        return InUse(self.versions(), {adapter: sorted(versions) for adapter, versions in past.items()})
