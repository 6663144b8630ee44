"""The adapters that engines serve with weights.lora=versions: their names, which answers what, and which are in use.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from asyncrl.config import Config
from asyncrl.config.roles import AgentsConfig, PastConfig
from asyncrl.engine.served import InUse, ServedWeights
from asyncrl.engine.session import GenerationSession, Request, seed_of
from asyncrl.extensions.lora.roles import adapter_of, drawn
from asyncrl.extensions.lora.rules import past_versions, serves
from asyncrl.network.addresses import Addresses
from asyncrl.schema import POLICY

AdapterName = Callable[[int, str], str | None]
"""Returns the name under which engines serve a version of an adapter; None is the base without an adapter."""


def adapter_names(config: Config, run_id: str) -> AdapterName | None:
    """Return the names of the adapters of one start of a run; None if the engines serve none.

    SGLang loads an unloaded adapter again when a request names it, from wherever it came, so that a name must never
    mean two adapters. `run_id` is another one at every start. Version 0 is the base itself, because B starts at zero,
    unless the run starts from an adapter.
    """
    if not serves(config):
        return None
    first = 0 if config.trainer.lora.path else 1

    def name(version: int, adapter: str) -> str | None:
        if version < first:
            return None
        return f"{run_id}-v{version}" if adapter == POLICY else f"{run_id}-{adapter}-v{version}"

    return name


PastVersions = Callable[[int], dict[str, list[int]]]
"""Returns the past versions of each adapter that episodes may use while a version is the newest (rules.past_versions).
"""


def no_past(version: int) -> dict[str, list[int]]:
    """Return no past version."""
    return {}


@dataclass
class ServedAdapters(ServedWeights):
    """Chooses the adapter that answers a request: that of its role, at the newest version or a past one. Counts who
    uses which version's."""

    agents: AgentsConfig = field(default_factory=lambda: AgentsConfig(roles={}))
    """Adapters of roles."""
    names: AdapterName | None = None
    """Names of the adapters in the engines, if every version is adapters of its own there."""
    per: Literal["completion", "episode"] = "completion"
    """What keeps one of these versions (rollout.adapter_per)."""
    past_versions: PastVersions = no_past
    """Past versions that play some of the roles (rules.past_versions)."""
    shared: bool = True
    """Whether siblings may share a request."""
    _users: Counter[int] = field(default_factory=Counter)

    # -- choice --------------------------------------------------------------------------------------------

    @property
    def pins(self) -> bool:  # type: ignore[override]
        """Return whether every version is adapters of its own in the engines."""
        return self.names is not None

    def trains(self, role: str) -> bool:
        """Return whether the turns of a role are trained: no past version plays it."""
        return self.past_of(role) is None

    def past_of(self, role: str) -> PastConfig | None:
        """Return the past versions that play a role; None if the newest plays it."""
        return self.agents.roles[role].past if role in self.agents.roles else None

    def assign(self, request: Request, newest: int) -> None:
        """Set the adapter that answers a request, and its version if versions are adapters."""
        session, past = request.session, self.past_of(request.role)
        request.model = adapter_of(self.agents, request.role)
        if past and session.purpose == "training":
            request.purpose = "past"
        if self.names:
            version = _drawn(session, past, request.role) if past else self._version_for(session, newest)
            name = self.names(version, request.model)
            request.pinned = version
            request.holds = None if past else version  # past versions stay of themselves
            request.fields = {"lora_path": name} if name else {}

    def _version_for(self, session: GenerationSession, newest: int) -> int:
        """Return the version of the adapters of a session's next request."""
        if session.pinned is None and self.per == "episode":
            session.pinned = newest
            self.acquire(newest)
            if any(one.version not in (None, newest) for one in session.recalled if session.trains(one.role)):
                session.recalled = []  # turns of an adapter that no engine has any more: the episode is played anew
        return newest if session.pinned is None else session.pinned

    def closed(self, session: GenerationSession) -> None:
        """End the use of the version that a session kept."""
        if self.per == "episode" and session.purpose == "training":
            self.release(session.pinned)

    # -- use -----------------------------------------------------------------------------------------------

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
    def held(self, version: int) -> Iterator[int | None]:
        """Yield this version, whose adapters stay loaded inside the block; None if versions are no adapters."""
        used = version if self.names else None
        self.acquire(used)
        try:
            yield used
        finally:
            self.release(used)

    def versions(self) -> list[int]:
        """Return the versions in use."""
        return sorted(self._users)

    def in_use(self, newest: int) -> InUse:
        """Return what engines must keep while `newest` is the newest version. An evaluation plays roles of past
        versions with the newest one of the version that it began with, which may be older than any episode's."""
        past = {adapter: set(versions) for adapter, versions in self.past_versions(newest).items()}
        for version in self._users:
            for adapter, versions in self.past_versions(version).items():
                past[adapter].add(versions[-1])
        return InUse(self.versions(), {adapter: sorted(versions) for adapter, versions in past.items()})


def _drawn(session: GenerationSession, past: PastConfig, role: str) -> int:
    """Return the past version that plays a role in an episode, the same in every attempt and after a resume; in an
    evaluation the newest."""
    versions = drawn(past, session.born)
    return versions[-1 if session.purpose == "evaluation" else seed_of(f"{session.sample} {role}") % len(versions)]


def served_adapters(config: Config, addresses: Addresses) -> ServedAdapters:
    """Return what answers the requests of a run. A stock server (engine.urls) cannot unload an adapter after a request
    with several samples (hooks.py): siblings share none there."""
    names = adapter_names(config, addresses.run_id)
    shared = not (names and addresses.attached)
    return ServedAdapters(config.agents, names, config.rollout.adapter_per, partial(past_versions, config), shared)
