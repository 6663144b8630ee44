"""Workload of the stub engines and the stub trainer (stub_run.py), passed through the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import SimulatedEpisode
from scripts import slow_tools

VARIABLE = "ASYNCRL_STUB_WORKLOAD"


@dataclass(frozen=True)
class Workload:
    """Behaviour of the stubs."""

    lengths: dict[str, Any]  # planner.lengths.Lengths
    per_token: float  # seconds of a decode step
    start_after: list[float]  # of each engine: seconds until it listens
    train_seconds: float
    train_per_token: float = 0.0
    """Further seconds of a step, for each token of its batch."""
    per_request: float = 0.00012
    max_running: int = 256
    growth: tuple[float, float] = (1.0, 1.0)
    """Factor by which answers grow, and the number of versions in which they do."""
    late: dict[int, float] = field(default_factory=dict)  # by version: seconds before its batch is asked for
    slow: dict[int, float] = field(default_factory=dict)  # by version: share of its batch that is read at first

    loaded: str = ""
    """File in which the stub engines write down the weights that they load from the disk (scripts/stub_engine.py), of
    trainers that are the run's own; empty: the trainer is a stub, too."""

    @classmethod
    def read(cls) -> Workload:
        """Read the workload from the environment."""
        values = json.loads(os.environ[VARIABLE])
        by_version = {name: {int(key): value for key, value in values[name].items()} for name in ("late", "slow")}
        return cls(**{**values, **by_version})

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which the stubs and the agent read it."""
        return {VARIABLE: json.dumps(asdict(self)), slow_tools.VARIABLE: json.dumps(self.lengths)}

    def episodes(self) -> Callable[[int], Sequence[SimulatedEpisode]]:
        """Return a function that returns the siblings of a question by its number."""
        return Lengths(**self.lengths).episodes()
