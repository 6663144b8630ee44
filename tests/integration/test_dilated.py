"""Publishes on time-dilated engines: the real rollout process, router, training loop and thread, with engines
that take the computed time, and no weights (scripts/dilated_run.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting
from scripts.dilated_run import DilatedRun

BOUND, FILL, PAUSE = 3, 0.1, 0.5
SETTING = Setting(
    2, 400.0, BOUND, train_fixed=0.4, pause=PAUSE, spread=True, in_play=0, shape=EngineShape(0.03, 0.0005, 32)
)
"""The trainer takes about 1.7 s for a step, the longest answer 3 s."""


@pytest.fixture(scope="module")
def dilated() -> Iterator[DilatedRun]:
    run = DilatedRun(Lengths(mean=20, sigma=0.9, longest=100, group_size=4), batch_groups=4)
    yield run
    run.close()


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_survive_publishes_and_overlap_trains(overlap: bool, dilated: DilatedRun) -> None:
    """Every answer has the length that its engine was given (the run checks it), and none is asked for twice."""
    found = dilated.run(replace(SETTING, overlap=overlap), 4, 3, fill=FILL)
    print(found)
    assert min(found.in_flight, found.crossing) > 0
    assert found.repeated == 0
    assert found.staleness_max <= BOUND
    assert bool(found.beside) == overlap
    assert found.engines_still >= PAUSE
    assert found.trainer_still >= FILL + (0.0 if overlap else PAUSE)
