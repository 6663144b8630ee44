"""Check of the settings that rollout.start_order requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.rules import require

if TYPE_CHECKING:
    from asyncrl.config import Config


def check_long_tail(config: Config) -> None:
    """Refuse settings under which prompts cannot be ordered. Raises ConfigError."""
    if config.rollout.start_order != "in_order":
        remedy = "Which lengths are known depends on timing: set false, or rollout.start_order=in_order."
        require(config, [("deterministic", config.deterministic, remedy)])
