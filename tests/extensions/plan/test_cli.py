"""asyncrl-plan with a recorded run: its own error, its own settings, and no GPUs where it had none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.extensions.plan.cli import main
from scripts import sizes

pytest.importorskip("asyncrl.extensions.slurm")  # the plans here are of its jobs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    values = ["engine.count=1", "trainer.data_parallel=2", "rollout.batch_groups=8", "rollout.max_new_tokens=2048"]
    settings = sizes.load("experiment=qwen3_8b", values=values)
    (tmp_path / "config.json").write_text(settings.model_dump_json(by_alias=True))
    steps = []
    for number in range(12):
        tokens, groups = 10_000 + 2_000 * (number % 4), 4 + number % 4
        seconds = tokens / 1000 + 3
        steps.append(
            {
                "step": number,
                "time/step": seconds,
                "time/wait_batch": 1,
                "time/pause": 1,
                "time/engine_busy": seconds,
                "tokens/trained": tokens,
                "tokens/generated": tokens,
                "groups/running": groups,
                "engines/serving": 1,
                "completion/length": 150,
                "episodes/turns": 1,
                "staleness/mean": 1.0,
            }
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    return tmp_path


def test_recorded_runs_error_is_printed_with_its_engine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "gpus=8", "--simulate", "0"]) == 0
    told = capsys.readouterr().out
    assert "Uncertainty: the run itself is predicted with an error of" in told
    assert "In its own setting the run is predicted to make" in told
    assert "changes over in 15 s" in told
    last = told.strip().splitlines()[-1]
    assert "trainer.data_parallel=" in last
    assert "engine.tensor_parallel" not in last
    assert "engine.max_running_requests" not in last
    assert main([str(run), "gpus=8", "engine_gpus=2", "--simulate", "0"]) == 0
    assert "engine.tensor_parallel=2" in capsys.readouterr().out.strip().splitlines()[-1]


def test_memory_is_measured_where_trained_and_else_computed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> tuple[str, dict[str, Any]]:
        page = run / "plan.json"
        assert main([str(run), "gpus=8", *words, "--simulate", "0", "--json", str(page)]) == 0
        return capsys.readouterr().out, json.loads(page.read_text())["best"]

    told, best = planned()
    assert (best["memory"], best["memory_measured"]) == ({}, [])
    assert "Memory per GPU is not known" in told
    steps = [json.loads(line) | {"memory/peak": 61.25e9} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    own = config.read(run).trainer.world_size
    told, best = planned(f"trainers={own}")
    assert (best["memory"], best["memory_measured"]) == ({"trainer": 61.25e9}, ["trainer"])
    assert "61 measured, -" in told
    assert "Memory per GPU: measured is the peak of the run (memory/peak), whose trainer had as many GPUs." in told
    values = json.loads((run / "config.json").read_text())
    values["model"]["path"] = str(run / "model")
    values["engine"]["max_total_tokens"] = 100_000
    (run / "config.json").write_text(json.dumps(values))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    _, best = planned(f"trainers={own}")
    assert best["memory"]["trainer"] == 61.25e9
    assert best["memory_measured"] == ["trainer"]
    assert best["memory"]["engine"] == pytest.approx(2 * 8.19e9 + 100_000 * 36 * 2048 * 2, rel=0.01)  # all on one GPU
    copies = 2 * own
    _, best = planned(f"trainers={copies}", "gpus=16")
    shaped = sizes.load("experiment=qwen3_8b", values=["trainer.data_parallel=4", "rollout.max_new_tokens=2048"])
    assert shaped.trainer.world_size == copies
    assert best["memory"]["trainer"] == sum(sizes.size(shaped, sizes.MODELS["qwen3_8b"]).trainer.values())
    assert best["memory_measured"] == []


def test_a_run_on_cpus_changes_over_in_no_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "machine.json").write_text(json.dumps({"dtype": {}, "estimate": {"step": 1.0}}))
    page = run / "plan.json"
    assert main([str(run), "gpus=8", "--simulate", "0", "--json", str(page)]) == 0
    assert "changes over" not in capsys.readouterr().out
    assert json.loads(page.read_text())["input"]["switch"] == 0
    (run / "machine.json").write_text(json.dumps({"dtype": {}, "estimate": None}))
    assert main([str(run), "gpus=8", "--simulate", "0", "--json", str(page)]) == 0
    assert json.loads(page.read_text())["input"]["switch"] == 15
