"""Whole runs with adapters, one or several, with the death of an engine and of everything. They go on as if nothing had
happened, and leave the same adapters in every form."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import read
from asyncrl.extensions.convert.cli import main as convert
from asyncrl.extensions.lora.rules import resident_adapters
from asyncrl.metrics.fields import unknown
from tests.integration import roles
from tests.integration.books import balanced, check_books, check_replay, groups_of, tensors, trained, weights
from tests.integration.running import (
    Blow,
    descendants,
    finish,
    go_on_to_the_end,
    lines,
    nothing_is_left,
    processes_of,
    run,
    start,
    wait_for_step,
)

SETTINGS = (
    *("trainer.lora.rank=8", "weights.lora=versions", "rollout.max_staleness=2", "record=true", "checkpoint.every=5"),
    *("rollout.batch_groups=4", "rollout.group_size=8", "eval.questions=10", "eval.every=6"),
)


def check_versions(run_dir: Path, steps: int) -> None:
    """Check what adapters promise: one version for each completion, the bound, and few adapters."""
    config, records = read(run_dir), lines(run_dir / "metrics.jsonl")
    assert [one["version"] for one in records] == list(range(1, steps + 1))
    assert unknown({name for one in records for name in one}) == []
    assert max(one["staleness/max"] for one in records) == 2
    assert max(one["adapters/resident"] for one in records) <= resident_adapters(config)
    assert sum(one["requests/overtaken"] + one["tokens/inferred"] + one["time/pause"] for one in records) == 0
    turns = [turn for g in groups_of(run_dir) for t in g.trajectories for turn in t.turns]
    trained = {name for name, role in config.agents.roles.items() if not role.past}
    assert {turn.role for turn in turns} == (trained or {""})
    completions = [turn.completion for turn in turns]
    assert {len(one.versions) for one in completions} == {1}
    assert len({span.version for one in completions for span in one.versions}) > steps // 2
    assert all(one["version_min"] == one["version_max"] for one in lines(run_dir / "eval.jsonl"))
    assert json.loads((run_dir / "summary.json").read_text())["transport"].startswith("adapters in shared memory")


def check_forms(run_dir: Path, tmp_path: Path, steps: int) -> None:
    """Check that the last checkpoint and the exported folders hold the same adapters, and that PEFT computes with them
    what the merged weights compute."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = json.loads((run_dir / "addresses.json").read_text())["model"]
    checkpoint = CheckpointStore(run_dir).path(steps)
    assert convert(["to-peft", str(checkpoint), str(tmp_path / "peft")]) == 0
    folders = (tmp_path / "peft", run_dir / "hf")
    for adapter in read(run_dir).agents.adapters:
        same_adapter(tmp_path / "peft" / adapter, run_dir / "hf" / adapter)
        configs = [json.loads((folder / adapter / "adapter_config.json").read_text()) for folder in folders]
        assert configs[0] == configs[1]

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(10)[None]).logits

    def load(folder: Path | str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    found = [logits(load(model))]
    for adapter in read(run_dir).agents.adapters:
        adapted = PeftModel.from_pretrained(load(model), run_dir / "hf" / adapter)
        found.append(logits(load(run_dir / "hf-merged" / adapter)))
        torch.testing.assert_close(logits(adapted), found[-1], atol=1e-4, rtol=0)
    assert not any(torch.allclose(one, other, atol=1e-2) for one, other in itertools.combinations(found, 2))


def same_adapter(one: Path, other: Path) -> None:
    """Check that two PEFT folders hold the same adapter."""
    held, exported = tensors(one), tensors(other)
    assert held.keys() == exported.keys() != set()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in held.items())


@pytest.mark.integration
def test_adapters_survive_the_engine_and_a_resume(tmp_path: Path) -> None:
    """Two roles have an adapter each, and past versions of one of them play the third."""
    run_dir = tmp_path / "run"
    settings = (*SETTINGS, *roles.SETTINGS, "run.max_steps=20", "trainer.lora.save_merged=true")
    settings = (*settings, "trainer.optimizer.lr=5e-3", "resume=auto")
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
    assert balanced(run_dir).events.past_tokens > 0
    assert {folder.name for folder in (run_dir / "past/policy").iterdir()} >= {"v000018", "v000020"}
    again = ("resume=null", "mode=replay", f"replay.from={run_dir}", "checkpoint.every=null")
    whole = run(tmp_path / "whole", *settings, *again)
    assert trained(whole) == trained(lines(run_dir / "metrics.jsonl"))
    assert weights(tmp_path / "whole") == weights(run_dir)
    check_forms(run_dir, tmp_path, 20)


@pytest.mark.campaign
def test_two_roles_train_an_adapter_each_and_are_served(tmp_path: Path) -> None:
    """Every batch is on policy: with the adapter of the other role, log-probabilities would differ."""
    settings = ("rollout.max_staleness=0", "run.max_steps=4", "eval.questions=4", "rollout.batch_groups=4")
    steps = run(tmp_path / "run", *settings, experiment="self_play_adapters")
    assert max(one["logprob_gap/max"] for one in steps) < 1e-4
    assert all(one["grad_norm"] > 0 for one in steps)
    first, second = (tensors(tmp_path / "run/hf" / name) for name in ("first", "second"))
    assert not any(first[name].equal(second[name]) for name in first)


@pytest.mark.campaign
def test_run_with_merged_adapters_resumes_unchanged(tmp_path: Path) -> None:
    run_dir, merged = tmp_path / "run", ("trainer.lora.rank=4", "weights.lora=merged", "trainer.data_parallel=2")
    Blow("everything", 5, 0.15).strike(run_dir, *merged)
    text = go_on_to_the_end(run_dir, *merged)
    assert "resuming from" in text
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *merged)


@pytest.mark.campaign
@pytest.mark.parametrize("per", ["completion", "episode"])
def test_many_steps_never_exceed_the_bound(tmp_path: Path, per: str) -> None:
    run_dir = tmp_path / "run"
    run(run_dir, *SETTINGS, "run.max_steps=80", "engine.count=2", f"rollout.adapter_per={per}")
    check_versions(run_dir, 80)
    balanced(run_dir)


@pytest.mark.campaign
def test_engines_hold_the_base_and_the_starting_adapter(tmp_path: Path) -> None:
    """The first batch is on policy: with another base or adapter, its log-probabilities would differ."""
    first, second = tmp_path / "first", tmp_path / "second"
    short = (*SETTINGS, "run.max_steps=2", "checkpoint.every=null", "trainer.optimizer.lr=1e-30")
    for run_dir, start_from in ((first, ()), (second, (f"trainer.lora.path={first / 'hf'}",))):
        steps = run(run_dir, *short, "trainer.lora.base=nf4", *start_from)
        assert steps[0]["staleness/max"] == 0
        assert steps[0]["logprob_gap/max"] < 1e-4
    assert lines(second / "metrics.jsonl")[0]["adapters/resident"] == 2  # that of version 0, too
    same_adapter(first / "hf", second / "hf")
