"""Configuration of the roles of agents: which adapter plays which role, and roles that past versions play."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Name, Section

if TYPE_CHECKING:
    from asyncrl.config import Config

POLICY = "policy"
"""The adapter of roles that agents.roles does not name."""


class PastConfig(Section):
    """Past versions of an adapter, as opponents of the newest."""

    every: Count
    """Keep the versions that are multiples of this number. Version 0 is one of them."""
    keep: Count
    """Draw among this many of the newest versions that are kept."""

    def drawn(self, version: int) -> list[int]:
        """Return the versions among which an episode that was admitted at this version draws."""
        newest = version - version % self.every
        return list(range(max(0, newest - (self.keep - 1) * self.every), newest + 1, self.every))

    def needed(self, version: int, max_staleness: int) -> list[int]:
        """Return the versions that running episodes may have drawn, which were admitted at most `max_staleness`
        versions ago."""
        return list(range(self.drawn(max(0, version - max_staleness))[0], version + 1, self.every))


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

    def adapter_of(self, role: str) -> str:
        """Return the adapter of a role. Raises ConfigError if it has none."""
        if role in self.roles:
            return self.roles[role].adapter
        if POLICY not in self.adapters:
            remedy = f"The agent plays the role {role!r}, which has no adapter: set +agents.roles.NAME.adapter=ADAPTER."
            raise ConfigError("agents.roles", sorted(self.roles), remedy)
        return POLICY


def check_roles(config: Config) -> None:
    """Refuse roles whose adapters cannot be trained or served. Raises ConfigError."""
    agents = config.agents
    for name, role in agents.roles.items():
        field, others = (
            f"agents.roles.{name}.past",
            [one for one in agents.roles.values() if one.adapter == role.adapter],
        )
        if role.past and role.adapter != POLICY and all(one.past for one in others):
            remedy = f"No role trains the adapter {role.adapter}: name one, or set another agents.roles.{name}.adapter."
            raise ConfigError(field, role.past.model_dump(), remedy)
        if role.past and any(one.past not in (None, role.past) for one in others):
            remedy = f"Other roles play past versions of {role.adapter} with other settings: make them equal."
            raise ConfigError(field, role.past.model_dump(), remedy)
    if not config.trains or not agents.need_versions:
        return
    require(config, _rules(config))


def _rules(config: Config) -> list[Rule]:
    """Return each rule of several adapters as field, whether its value breaks it, and the remedy."""
    rank, lora = config.trainer.lora.rank, config.weights.lora
    return [
        ("trainer.lora.rank", rank is None, "Roles have LoRA adapters (agents.roles): set a rank."),
        (
            "weights.lora",
            lora == "merged",
            "Engines hold one set of merged weights, but roles have several adapters or past versions (agents.roles): "
            "set weights.lora=versions.",
        ),
        (
            "cluster.placement",
            config.cluster.takes_turns,
            "An engine that releases its memory loses the adapters of roles (agents.roles): set separate.",
        ),
        (
            "trainer.overlap_grad_reduce",
            config.trainer.overlap_grad_reduce and len(config.adapters) > 1,
            "The gradients of several adapters (agents.roles) are reduced after the passes of the last: set false.",
        ),
    ]
