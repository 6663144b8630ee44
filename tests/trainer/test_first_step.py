"""A trainer's first step on a GPU, which compiles kernels, has a deadline of its own; later steps have the stall
timeout."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.trainer.__main__ import watched
from tests.fakes import tiny_config


@pytest.mark.parametrize("gpu", [True, False])
def test_only_the_first_step_on_a_gpu_may_exceed_the_stall_timeout(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    progress, begins = watched(tiny_config(**{"cluster.stall_timeout": 30.0}), tmp_path, 2000.0, gpu=gpu)

    try:
        deadlines = []
        for step in range(3):
            for span in ("wait_batch", "train", "publish"):
                begins(span, step)
                deadlines.append(progress._within)
    finally:
        progress.end()
    assert deadlines == [2000.0, 2000.0 if gpu else 30.0, 2000.0, *([2000.0, 30.0, 2000.0] * 2)]
