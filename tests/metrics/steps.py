"""Steps of a run that is not there, and their records."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.algo.diagnostics import gap_figures, loss_figures
from asyncrl.algo.table import build_table
from asyncrl.metrics.record import StepLog
from asyncrl.rollout.snapshot import ResumableBuffer, ResumableGroups
from asyncrl.schema import Batch, Group
from tests.fakes import Clock, FakeClient, group

GROUPS = [
    group(0, [0.0, 1.0], tokens=4, versions=(0, 1)),
    group(1, [1.0, 1.0], tokens=2, versions=(2,), finish="length"),
]
NUM_TOKENS = 12
UPDATE = (
    *("groups/trained", "lr", "grad_norm", "steps/optimizer", "step/skipped", "step/bad"),
    *("loss", "tokens/trained", "tokens/packed", "tokens/shared"),
)
"""Figures of an update beside those of its tables: they come from Megatron."""
SENT = {"fill": 0.1, "pause": 0.25, "bytes": 100.0, "verify": 0.0, "engines": 1.0}


def rollout_figures() -> dict[str, float]:
    """Return metrics as the rollout process makes them."""
    client: Any = FakeClient()
    groups = ResumableGroups(ResumableBuffer(1, 1), client)  # type: ignore[arg-type]
    own = dict.fromkeys(("episodes/retried", "time/timeline", "time/metrics"), 0.0)  # of GroupPlayer and Timelines
    return groups._figures() | own


def policy_figures(**changes: float) -> dict[str, float]:
    """A realistic update. tests/integration/test_layouts.py holds that a run writes all documented fields."""
    keys = {*UPDATE}
    table = build_table(GROUPS, 2).trained(torch.zeros(NUM_TOKENS), torch.ones(NUM_TOKENS, dtype=torch.bool))
    table = table.with_proximal(torch.zeros(NUM_TOKENS))
    nothing = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    keys |= gap_figures(table, nothing).keys()
    keys |= loss_figures(table, nothing, nothing, nothing, cap=1.0, clip=(0.0, 0.0)).keys()
    return {**dict.fromkeys(sorted(keys), 0.5), **changes}


def stepped(log: StepLog, clock: Clock, version: int, groups: list[Group], **figures: float) -> dict[str, Any]:
    """One step: 1 s of waiting, 3 s of training, 0.5 s of publishing."""
    for name, seconds in (("wait_batch", 1.0), ("train", 3.0), ("publish", 0.5)):
        with log.span(name):
            clock.now += seconds
    rollout = rollout_figures() | {"tokens/generated": 20, "samples/generated": 4, "time/engine_busy": 1.5}
    return dict(log.step(version, Batch(version - 1, groups, rollout), policy_figures(**figures), SENT))
