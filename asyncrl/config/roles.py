"""Configuration of the roles of agents: which adapter plays which role, and roles that past versions play."""

from __future__ import annotations

from asyncrl.schema import POLICY
from asyncrl.settings import Count, Name, Section


class PastConfig(Section):
    """Past versions of an adapter, as opponents of the newest."""

    every: Count
    """Keep the versions that are multiples of this number. Version 0 is one of them."""
    keep: Count
    """Draw among this many of the newest versions that are kept."""


class RoleConfig(Section):
    """One role of an agent, by the name that it gives to `generate(..., role=NAME)`."""

    adapter: Name = POLICY
    """LoRA adapter that plays this role, and that its turns train."""
    past: PastConfig | None = None
    """Past versions play this role, one in each episode, and its turns train nothing. unset: the newest version plays
    it."""


class AgentsConfig(Section):
    """Roles of agents that talk to the policy in several (docs/agents.md)."""

    roles: dict[Name, RoleConfig]
    """Adapters of roles on one base, by role: +agents.roles.NAME.adapter=ADAPTER. Other roles use the adapter
    `policy`."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the adapters of all roles in order; `policy` alone if none is named."""
        return tuple(sorted({role.adapter for role in self.roles.values()})) or (POLICY,)

    @property
    def past(self) -> dict[str, PastConfig]:
        """Return the adapters whose past versions play a role."""
        return {role.adapter: role.past for role in self.roles.values() if role.past}

    @property
    def need_versions(self) -> bool:
        """Return whether engines must serve every version as adapters: merged weights are those of one adapter, and of
        the newest version."""
        return self.adapters != (POLICY,) or bool(self.past)
