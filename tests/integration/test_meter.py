"""A run measures its steps by purpose, and writes traces of the steps that it is asked to profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from asyncrl.metrics.fields import STEP_TRAINER
from tests.integration.running import run

pytestmark = pytest.mark.integration


def test_steps_are_measured_and_one_is_profiled_on_every_rank(tmp_path: Path) -> None:
    overrides = ("experiment=tiny", "trainer.tensor_parallel=2", "run.max_steps=3", "trainer.profile=[2]")
    steps = run(tmp_path / "run", *overrides)
    for step in steps:
        assert STEP_TRAINER.keys() - step.keys() == {"flops/utilization"}
        parts = [step[f"time/{part}"] for part in ("forward", "backward", "communication", "optimizer")]
        if step["groups/trained"]:
            assert min(parts[0], parts[1], parts[3]) > 0
            assert step["flops/rank"] > 0
        # parts are means of ranks, and train is of rank 0, which may begin a step after the others
        assert sum(parts) < step["time/step"]
        assert 1e8 < step["memory/peak"] < 1e10
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-000002-rank-{rank}.json.gz" for rank in (0, 1)]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert {"aten::mm", "_ScoresBackward"} & {event.get("name") for event in events}
