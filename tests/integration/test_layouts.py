"""The whole system on the real parts, in every layout: what the engine wrote is what the trainer trains.

With a bound of 0 every token is written by the very weights that train it, so the log-probabilities of engine and
trainer must agree to float32 rounding at every step: before any update, and after each publish. That holds only if
loading, resharding, publishing, token alignment and temperature are all right, on both sides.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.running import nothing_is_left, run

pytestmark = pytest.mark.integration

LAYOUTS = {
    "tp2-sp-two-engines-over-disk": [
        *("trainer.tensor_parallel=2", "trainer.sequence_parallel=true", "engine.count=2", "weights.transport=disk")
    ],
    "pp2-over-broadcast": ["trainer.pipeline_parallel=2", "weights.transport=distributed", "weights.staging=stream"],
}
DELTA = ["weights.transport=delta", "weights.verify_every=1"]
FURTHER = {  # docs/campaigns.md says which other tests hold what these repeat
    "tp2-two-engines": ["trainer.tensor_parallel=2", "engine.count=2"],
    "tp2-sp-two-engines": LAYOUTS["tp2-sp-two-engines-over-disk"][:3],
    "tp2-sp-over-broadcast": [*LAYOUTS["tp2-sp-two-engines-over-disk"][:2], "weights.transport=distributed"],
    "dp2-over-delta": ["trainer.data_parallel=2", *DELTA],
    "dp2-over-disk": ["trainer.data_parallel=2", "weights.transport=disk"],
    "pp2-over-delta": ["trainer.pipeline_parallel=2", *DELTA],
    "pp2-over-broadcast-two-engines": [*LAYOUTS["pp2-over-broadcast"], "engine.count=2"],
}
CASES = [
    *(pytest.param(layout, id=name) for name, layout in LAYOUTS.items()),
    *(pytest.param(layout, id=name, marks=pytest.mark.campaign) for name, layout in FURTHER.items()),
]
SYNCHRONOUS = [
    "rollout.max_staleness=0",
    "run.max_steps=5",
    "eval.questions=8",
    "rollout.batch_groups=8",
    "rollout.group_size=8",
]


@pytest.mark.parametrize("layout", CASES)
def test_engine_and_trainer_agree_before_any_update_and_after_every_publish(layout: list[str], tmp_path: Path) -> None:
    steps = run(tmp_path / "run", *SYNCHRONOUS, *layout)
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5]
    assert max(step["staleness/max"] for step in steps) == 0
    assert max(step["logprob_gap/max"] for step in steps) < 1e-4
    assert steps[0]["time/verify"] > 0  # every run's first publish is verified
    assert min(step["grad_norm"] for step in steps) > 0  # the weights did change between publishes
    nothing_is_left(tmp_path / "run")


@pytest.mark.campaign
def test_an_asynchronous_run_keeps_its_bound_and_its_word(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = run(
        run_dir,
        "trainer.tensor_parallel=2",
        "engine.count=2",
        "rollout.max_staleness=4",
        "run.max_steps=40",
        "eval.every=20",
    )
    assert 0 < max(step["staleness/max"] for step in steps) <= 4
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]["groups"]
    assert ledger["trained"] == 40 * 16
    assert ledger["issued"] == sum(ledger[place] for place in ("running", "ready", "training", "trained")) + sum(
        ledger["rejected"].values()
    )
    assert sum(summary["staleness/histogram"].values()) == 40 * 16 * 16
    evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert evaluations[0]["version_max"] == 0
    assert evaluations[-1]["version_min"] == 40
    nothing_is_left(run_dir)
