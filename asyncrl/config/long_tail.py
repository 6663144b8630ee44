"""Check of the settings that rollout.migrate_after and rollout.start_order require, with which answers move between
engines and prompts are started in an order of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import Rule, require

if TYPE_CHECKING:
    from asyncrl.config import Config


def check_long_tail(config: Config) -> None:
    """Refuse settings under which answers cannot move, or prompts cannot be ordered. Raises ConfigError."""
    if config.rollout.migrate_after is not None:
        require(config, _migration(config), ", or set rollout.migrate_after=null.")
    if config.rollout.start_order != "in_order":
        remedy = "Which lengths are known depends on timing: set false, or rollout.start_order=in_order."
        require(config, [("deterministic", config.deterministic, remedy)])


def _migration(config: Config) -> list[Rule]:
    """Return each rule as field, whether its value breaks it, and the remedy."""
    engine, rollout, mode = config.engine, config.rollout, config.weights.pause_mode
    return [
        (
            "deterministic",
            config.deterministic,
            "When an answer moves depends on timing, and its last bits on where it is prefilled: set false",
        ),
        (
            "engine.router_policy",
            engine.router_policy != "manual",
            "Only this policy sends a new key to the engine with the fewest requests: set manual",
        ),
        (
            "rollout.coalesce",
            rollout.coalesce,
            "An answer cannot leave a request that it shares with siblings, which the router counts as one: set false",
        ),
        (
            "weights.pause_mode",
            mode == "drain",
            "An answer that leaves its engine when a publish begins continues under the new weights: set in_place, "
            "retract or abort",
        ),
        (
            "engine.prefill_count",
            engine.disaggregated,
            "A request is at two engines, of which the router counts each for itself: set engine.count",
        ),
    ]
