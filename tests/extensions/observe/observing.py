"""The hooks in the rollout process, begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.extensions.observe.extension import TraceSettings
from asyncrl.extensions.observe.hooks import ObserveRollout
from asyncrl.network.addresses import Addresses
from asyncrl.rollout.reporters import RolloutRun
from tests.fakes import addresses, tiny_config


def observing(
    run_dir: Path,
    warn: Callable[..., None] = print,
    where: Addresses | None = None,
    name: str = "a run",
    **settings: Any,
) -> ObserveRollout:
    """Return the hooks of a run with these settings."""
    hooks = ObserveRollout(TraceSettings(**settings))
    hooks.start(RolloutRun(tiny_config(**{"run.name": name}), where or addresses(), run_dir, warn))
    return hooks
