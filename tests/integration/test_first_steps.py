"""An engine whose first step takes longer than every timeout of a running engine is not taken for a hung one: the
warm-up, which compiles kernels on a GPU, belongs to its start. (SGLang's own health check generates one token without
log-probabilities, and so compiles a part of them.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.running import output, run

pytestmark = pytest.mark.integration

SLOW = """
import time
from asyncrl.import_hooks import after_import

def slow_at_first(module):
    first, own = [True], module.Scheduler.run_batch
    def run_batch(self, batch, *args, **kwargs):
        if first and batch.return_logprob:
            first.clear()
            time.sleep(25.0)
        return own(self, batch, *args, **kwargs)
    module.Scheduler.run_batch = run_batch

after_import("sglang.srt.managers.scheduler", slow_at_first)
"""


def test_compiling_engine_is_not_taken_for_a_hung_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    steps = run(
        tmp_path / "run",
        "+engine.server_args.warmups=asyncrl",  # the default on a GPU
        "engine.count=1",
        "engine.request_timeout=10.0",
        "engine.retry_timeout=12.0",
        "weights.timeout=10.0",
        "cluster.max_restarts=0",
        "run.max_steps=2",
        "eval.questions=0",
    )
    assert len(steps) == 2
    assert "does not answer" not in output(tmp_path / "run")
