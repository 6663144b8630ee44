"""Which adapter plays a role, and which of its past versions."""

from __future__ import annotations

from asyncrl.config.roles import AgentsConfig, PastConfig
from asyncrl.errors import ConfigError
from asyncrl.schema import POLICY


def drawn(past: PastConfig, version: int) -> list[int]:
    """Return the versions among which an episode that was admitted at this version draws."""
    newest = version - version % past.every
    return list(range(max(0, newest - (past.keep - 1) * past.every), newest + 1, past.every))


def needed(past: PastConfig, version: int, max_staleness: int) -> list[int]:
    """Return the versions that running episodes may have drawn, which were admitted at most `max_staleness` versions
    ago."""
    return list(range(drawn(past, max(0, version - max_staleness))[0], version + 1, past.every))


def adapter_of(agents: AgentsConfig, role: str) -> str:
    """Return the adapter of a role. Raises ConfigError if it has none."""
    if role in agents.roles:
        return agents.roles[role].adapter
    if POLICY not in agents.adapters:
        remedy = f"The agent plays the role {role!r}, which has no adapter: set +agents.roles.NAME.adapter=ADAPTER."
        raise ConfigError("agents.roles", sorted(agents.roles), remedy)
    return POLICY
