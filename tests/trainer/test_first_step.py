"""Deadlines of a trainer: its first step on a GPU, which compiles kernels, has one of its own, later steps have the
stall timeout, and a wait for others has the sum of what they may take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer import gpu_sharing  # noqa: E402
from asyncrl.trainer.rank import limit, longest_wait, watched  # noqa: E402
from tests.fakes import tiny_config  # noqa: E402


@pytest.mark.parametrize("gpu", [True, False])
def test_only_the_first_gpu_step_may_exceed_the_timeout(
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


@pytest.mark.parametrize("shared", [False, True])
def test_wait_for_engines_may_last_as_a_whole_hand_over(shared: bool) -> None:
    deadlines = {"rollout.batch_timeout": 50.0, "engine.start_timeout": 100.0, "weights.timeout": 30.0}
    placement = {"cluster.placement": "shared" if shared else "separate"}
    assert longest_wait(tiny_config(**deadlines, **placement)) == (220.0 if shared else 100.0)


@pytest.mark.parametrize(
    ("placement", "gpu", "limits"), [("shared", True, [0.5]), ("shared", False, []), ("separate", True, [])]
)
def test_trainer_beside_an_engine_keeps_to_its_part(
    placement: str, gpu: bool, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then runs out of memory itself, before the engine on its GPU does."""
    found = list[float]()
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    limit(tiny_config(**{"cluster.placement": placement}), gpu=gpu)
    assert found == limits


@pytest.mark.parametrize("placement", ["shared", "separate"])
def test_trainer_uses_a_gpu_after_its_engines_measured_it(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank waits for the engines, and the others for it."""
    done = list[str]()
    monkeypatch.setattr(dist, "barrier", lambda: done.append("barrier"))
    config = tiny_config(**{"cluster.placement": placement})
    first = SimpleNamespace(is_first=True)
    rank: Any = SimpleNamespace(config=config, parallel=first, wait_for_engines=lambda: done.append("ready"))
    fleet: Any = None
    sharing = gpu_sharing.share_gpu(rank, fleet)
    assert done == (["ready", "barrier"] if placement == "shared" else [])
    assert sharing.update is None
