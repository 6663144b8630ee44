"""Whole runs whose versions are adapters, one or several, with the death of an engine and of everything."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.config import read
from asyncrl.config.adapters import resident_adapters
from asyncrl.metrics.fields import unknown
from tests.integration import roles
from tests.integration.running import (
    descendants,
    finish,
    lines,
    nothing_is_left,
    processes_of,
    run,
    start,
    wait_for_step,
)
from tests.integration.test_agents import books_balance, groups_of

SETTINGS = (
    *("trainer.lora.rank=8", "weights.lora=versions", "rollout.max_staleness=2", "record=true", "checkpoint.every=5"),
    *("rollout.batch_groups=4", "rollout.group_size=8", "eval.questions=10", "eval.every=6"),
)


def check_versions(run_dir: Path, steps: int) -> None:
    """Check what adapters promise: one version for each completion, the bound, and few adapters."""
    config = read(run_dir)
    records = lines(run_dir / "metrics.jsonl")
    assert [one["version"] for one in records] == list(range(1, steps + 1))
    assert unknown({name for one in records for name in one}) == []
    assert max(one["staleness/max"] for one in records) == 2
    assert max(one["adapters/resident"] for one in records) <= resident_adapters(config)
    assert sum(one["requests/overtaken"] + one["tokens/inferred"] + one["time/pause"] for one in records) == 0
    turns = [turn for g in groups_of(run_dir) for t in g.trajectories for turn in t.turns]
    completions = [turn.completion for turn in turns]
    assert {turn.role for turn in turns} == {name for name, role in config.agents.roles.items() if not role.past} or {
        ""
    }
    assert {len(one.versions) for one in completions} == {1}
    assert len({span.version for one in completions for span in one.versions}) > steps // 2
    assert all(one["version_min"] == one["version_max"] for one in lines(run_dir / "eval.jsonl"))
    assert json.loads((run_dir / "summary.json").read_text())["transport"].startswith("adapters in shared memory")


@pytest.mark.integration
def test_a_run_with_several_adapters_survives_its_engine_and_is_resumed_after_everything_died(tmp_path: Path) -> None:
    """Two roles have an adapter each, and past versions of one of them play the third."""
    run_dir, again = tmp_path / "run", tmp_path / "again"
    settings = (*SETTINGS, *roles.SETTINGS, "run.max_steps=20", "resume=auto")
    with start(run_dir, *settings) as process:
        wait_for_step(process, run_dir, 3)
        os.kill(processes_of(process, run_dir)["engine-0"], signal.SIGKILL)
        wait_for_step(process, run_dir, 8)
        started = descendants(process)
        process.kill()  # its children die with it
        _, text = finish(process, run_dir)
    assert "engine-0 died (killed by SIGKILL" in text
    assert "weights.lora versions (as configured)" in text
    nothing_is_left(run_dir, started)
    run(run_dir, *settings)
    check_versions(run_dir, 20)
    ledger = books_balance(run_dir)
    assert ledger["events"]["past_tokens"] > 0
    assert sum(one["tokens/past"] for one in lines(run_dir / "metrics.jsonl")) <= ledger["events"]["past_tokens"]
    assert {folder.name for folder in (run_dir / "past/policy").iterdir()} >= {"v000018", "v000020"}
    assert {folder.name for folder in (run_dir / "hf").iterdir()} == {"policy", "second"}
    more = ("resume=null", "mode=replay", f"replay.from={run_dir}", "replay.last=2", "checkpoint.every=null")
    trained = lines(run_dir / "metrics.jsonl")[:3]
    assert [one["loss"] for one in run(again, *settings, *more)] == [one["loss"] for one in trained]


@pytest.mark.campaign
def test_two_roles_of_self_play_train_an_adapter_each_and_engines_serve_both(tmp_path: Path) -> None:
    """Every batch is on policy: with the adapter of the other role, log-probabilities would differ."""
    run_dir = tmp_path / "run"
    settings = (
        "rollout.max_staleness=0",
        "run.max_steps=4",
        "eval.questions=4",
        "rollout.batch_groups=4",
        "record=true",
    )
    steps = run(run_dir, *settings, experiment="self_play_adapters")
    assert max(one["logprob_gap/max"] for one in steps) < 1e-4
    assert all(one["grad_norm"] > 0 for one in steps)
    first, second = (load_file(run_dir / f"hf/{name}/adapter_model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert not any(first[name].equal(second[name]) for name in first)


@pytest.mark.campaign
@pytest.mark.parametrize("per", ["completion", "episode"])
def test_many_steps_never_exceed_the_bound(tmp_path: Path, per: str) -> None:
    run_dir = tmp_path / "run"
    run(run_dir, *SETTINGS, "run.max_steps=80", "engine.count=2", f"rollout.adapter_per={per}")
    check_versions(run_dir, 80)
    books_balance(run_dir)


@pytest.mark.campaign
def test_engines_hold_the_base_and_the_adapter_that_a_run_starts_from(tmp_path: Path) -> None:
    """The first batch is on policy: with another base or adapter, its log-probabilities would differ."""
    first, second = tmp_path / "first", tmp_path / "second"
    short = (*SETTINGS, "run.max_steps=2", "checkpoint.every=null")
    for run_dir, start_from in ((first, ()), (second, (f"trainer.lora.path={first / 'hf'}",))):
        steps = run(run_dir, *short, "trainer.lora.base=nf4", *start_from)
        assert steps[0]["staleness/max"] == 0
        assert steps[0]["logprob_gap/max"] < 1e-4
    assert lines(second / "metrics.jsonl")[0]["adapters/resident"] == 2  # that of version 0, too
