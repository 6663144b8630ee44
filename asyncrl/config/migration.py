"""Check of the settings that rollout.migrate_after requires, with which answers move between engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config

FIELD = "rollout.migrate_after"


def check_migration(config: Config) -> None:
    """Refuse settings under which answers cannot move between engines. Raises ConfigError."""
    if config.rollout.migrate_after is not None:
        require(_rules(config), f", or set {FIELD}=null.")


def _rules(config: Config) -> list[Rule]:
    """Return each rule as field, value, whether the value breaks it, and the remedy."""
    engine, rollout, mode = config.engine, config.rollout, config.weights.pause_mode
    return [
        (
            "deterministic",
            True,
            config.deterministic,
            "When an answer moves depends on timing, and its last bits on where it is prefilled: set false",
        ),
        (
            "engine.router_policy",
            engine.router_policy,
            engine.router_policy != "manual",
            "Only this policy sends a new key to the engine with the fewest requests: set manual",
        ),
        (
            "rollout.coalesce",
            True,
            rollout.coalesce,
            "An answer cannot leave a request that it shares with siblings, which the router counts as one: set false",
        ),
        (
            "weights.pause_mode",
            "drain",
            mode == "drain",
            "An answer that leaves its engine when a publish begins continues under the new weights: set in_place, "
            "retract or abort",
        ),
        (
            "engine.prefill_count",
            engine.prefill_count,
            engine.disaggregated,
            "A request is at two engines, of which the router counts each for itself: set engine.count",
        ),
    ]
