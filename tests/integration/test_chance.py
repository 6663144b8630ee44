"""Settings that people combine, drawn by chance, and processes that die by chance, also while the final weights are
evaluated: a run is refused with its reason, or ends with balanced books as if nobody had died."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.books import check_books
from tests.integration.running import RUN, finish, lines, processes_of, start

STEPS = 10
RECOVERS = [one for one in RUN if not one.startswith(("eval", "cluster", "run.max_steps"))]
RECOVERS += [f"run.max_steps={STEPS}", "eval.questions=40", "eval.max_running=4", "cluster.max_restarts=5"]
BUNDLES = """
trainer.lora.rank=4
trainer.lora.rank=4 weights.lora=versions
trainer.lora.rank=4 weights.lora=merged
cluster.placement=colocated weights.pause_mode=retract rollout.max_staleness=1 rollout.lead=1
quantized.format=fp8_simulated
processes.count=2
weights.overlap=true
weights.transport=disk
weights.transport=delta
weights.transport=distributed
weights.pause_mode=drain
weights.pause_mode=abort
weights.verify_every=1
engine.count=2
engine.tensor_parallel=2
trainer.tensor_parallel=2 trainer.sequence_parallel=true
trainer.data_parallel=2 trainer.overlap_grad_reduce=true
trainer.pipeline_parallel=2
trainer.context_parallel=2
trainer.batch_parts=2
algo=ppo
algo.kl.coefficient=0.01
teacher=sglang algo.kl.reference=teacher algo.kl.coefficient=0.01
algo.mini_batches=2
rollout.max_staleness=0 rollout.lead=null
rollout.oversample=2
rollout.accept=asyncrl.rollout.hooks:has_signal
rollout.over_age=drop
rollout.coalesce=false
rollout.max_running_groups=auto
eval.samples=2
offload.optimizer=true
""".strip().splitlines()


def kill_one(process: subprocess.Popen[str], run_dir: Path, draw: random.Random) -> None:
    """Kill a process of the run at a random moment after a random step, or in the final evaluation."""
    step, ends = draw.randrange(1, STEPS + 1), run_dir / "hf/model.safetensors.index.json"
    while process.poll() is None and not ends.exists() and len(lines(run_dir / "metrics.jsonl")) < step:
        time.sleep(0.05)
    time.sleep(draw.random() / 2)
    if process.poll() is None and (found := processes_of(process, run_dir)):
        name = draw.choice(sorted(found))
        print(f"after step {step}: {name}")
        psutil.Process(found[name]).send_signal(signal.SIGKILL)


@pytest.mark.campaign
@pytest.mark.parametrize("trial", range(int(os.environ.get("ASYNCRL_TRIALS", "20"))))
def test_no_death_shows_in_a_run_of_any_settings(trial: int, tmp_path: Path) -> None:
    draw, run_dir = random.Random(trial), tmp_path / "run"
    settings = [word for bundle in draw.sample(BUNDLES, draw.randint(1, 3)) for word in bundle.split()]
    print(*settings)
    with start(run_dir, *RECOVERS, *settings) as process:
        for _ in range(draw.randint(1, 2)):
            kill_one(process, run_dir, draw)
        code, text = finish(process, run_dir)
    if code == 2 or (code and "preflight: " in text):
        assert "invalid setting\n" in text or "-> " in text, text
        pytest.skip(f"refused: {text.splitlines()[-1]}")
    assert code == 0, text
    check_books(run_dir, STEPS)
