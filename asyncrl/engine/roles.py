"""The adapter of a request: that of its role, at the newest version or a past one (agents.roles)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from asyncrl.config.roles import AgentsConfig, PastConfig
from asyncrl.engine.inflight import InFlight
from asyncrl.engine.partial_completion import Exchange
from asyncrl.engine.session import GenerationSession, seed_of

ONE_ADAPTER = AgentsConfig(roles={})


class RoleAdapters:
    """Chooses the adapters of a client's requests. `versions` says whether every version is adapters of its own in the
    engines, `per` what keeps one version (rollout.adapter_per)."""

    def __init__(
        self, agents: AgentsConfig, inflight: InFlight, *, versions: bool, per: Literal["completion", "episode"]
    ) -> None:
        self._agents, self._inflight, self.versions, self._per_episode = agents, inflight, versions, per == "episode"

    def past_of(self, role: str) -> PastConfig | None:
        """Return the past versions that play a role; None if the newest plays it."""
        return self._agents.roles[role].past if role in self._agents.roles else None

    def assign(self, session: GenerationSession, exchange: Exchange) -> None:
        """Set the adapter that answers a request, and its version if versions are adapters."""
        exchange.name, past = self._agents.adapter_of(exchange.role), self.past_of(exchange.role)
        if past:
            exchange.past = True
            exchange.purpose = "past" if session.purpose == "training" else session.purpose
            exchange.adapter = _drawn(past, session, exchange.role) if self.versions else None
        elif self.versions:
            exchange.adapter = self._version_for(session)

    def _version_for(self, session: GenerationSession) -> int:
        """Return the version of the adapters of a session's next request."""
        newest = self._inflight.version
        if session.adapter is None and self._per_episode:
            session.adapter = newest
            self._inflight.adapters.acquire(newest)
            if any(one.version not in (None, newest) for one in session.recalled if session.trains(one.role)):
                session.recalled = []  # turns of an adapter that no engine has any more: the episode is played anew
        return newest if session.adapter is None else session.adapter

    def release(self, session: GenerationSession) -> None:
        """End the use of the version that a session kept."""
        if self._per_episode and session.purpose == "training":
            self._inflight.adapters.release(session.adapter)

    @contextmanager
    def newest(self) -> Iterator[int | None]:
        """Yield the newest version, whose adapters stay loaded inside the block; None if versions are no adapters."""
        with self._inflight.adapters.held(self._inflight.version if self.versions else None) as version:
            yield version


def _drawn(past: PastConfig, session: GenerationSession, role: str) -> int:
    """Return the past version that plays a role in an episode, the same in every attempt and after a resume; in an
    evaluation the newest."""
    versions = past.drawn(session.born)
    return versions[-1 if session.purpose == "evaluation" else seed_of(f"{session.sample} {role}") % len(versions)]
