"""The command's --check, and what a run does by itself: all findings are told, and at an error nothing starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.errors import LaunchError
from asyncrl.launch.preflight.findings import Finding, failed
from asyncrl.launch.preflight.folders import look_at
from asyncrl.launch.preflight.model_files import INDEX, read_model
from asyncrl.launch.preflight.run import preflight, require
from asyncrl.models import catalog
from asyncrl.planner.memory import buckets
from asyncrl.weights.bucket import plan_buckets
from tests.fakes import compose_values, tiny_config
from tests.launch.preflight.worlds import job, write_model


def found(config: Config, tmp_path: Path) -> dict[str, Finding]:
    return {one.field: one for one in preflight(config, tmp_path / "run")}


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "asyncrl.launch.main", "experiment=tiny", f"run.dir={cwd}/run", *arguments]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return subprocess.run(program, capture_output=True, text=True, cwd=cwd, env=plain, check=False)


def test_the_command_tells_and_leaves_nothing(tmp_path: Path) -> None:
    done = command("--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "preflight: 0 error(s)" in done.stdout
    for field in ("versions", "model.path", "memory", "run.dir", "weights.transport"):
        assert f"ok       {field}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_would_fail_is_not_started_and_its_folder_not_touched(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    for arguments in (("--check",), ("cluster.preflight=true",)):
        done = command(f"model.path={model}", *arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert "has no tokenizer" in " ".join(done.stdout.split())  # lines are filled
        assert not (tmp_path / "run").exists()
    assert "model.path (cluster.preflight)" in done.stderr


def test_jobs_look_by_themselves_and_runs_on_this_machine_only_when_asked() -> None:
    settings = {name: compose_values(f"cluster={name}")["cluster"]["preflight"] for name in ("local", "slurm")}
    assert settings == {"local": False, "slurm": True}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"trainer.tensor_parallel": 3}, "trainer.tensor_parallel", "Must divide"),
        ({"model.path": "/nowhere"}, "model.path", "Give a folder"),
        ({"trainer.device": "cuda"}, "trainer.device", "use cpu or auto"),
        ({"cluster.interface": "nosuch0", "cluster.host": None}, "cluster.interface", "name one"),
        ({"model.chat_template": "/nowhere"}, "model.chat_template", "name a jinja file"),
        ({"engine.max_total_tokens": 10**12}, "memory", "engine.max_total_tokens"),
    ],
)
def test_what_a_launch_would_refuse_is_a_finding_among_the_others(
    changes: dict[str, object], field: str, remedy: str, tmp_path: Path
) -> None:
    findings = found(tiny_config(**changes), tmp_path)
    assert findings[field].level == "error"
    assert remedy in findings[field].remedy
    assert findings["versions"].level == findings["run.dir"].level == "ok"
    with pytest.raises(LaunchError, match=field):
        require(tiny_config(**changes), tmp_path / "run")


def test_a_job_to_come_is_placed_on_machines_that_are_imagined(tmp_path: Path) -> None:
    config = job(**{"cluster.gpus": 8, "trainer.data_parallel": 8, "engine.count": 8})
    findings = found(config, tmp_path)
    assert not failed(list(findings.values()))
    assert "a job of 2 machine(s)" in findings["cluster.launcher"].value
    assert "not known here" in findings["trainer"].value
    assert "distributed" in findings["weights.transport"].value
    assert found(job(), tmp_path)["cluster.gpus"].level == "error"


def test_without_trainers_nothing_is_said_of_them(tmp_path: Path) -> None:
    findings = found(tiny_config(mode="rollout_only", record=True), tmp_path)
    assert "engine" in findings
    assert not {"trainer", "weights.transport", "checkpoint.every"} & findings.keys()


def test_looking_at_a_folder_measures_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "one").write_bytes(bytes(1000))
    seen = look_at(tmp_path, 1 << 20)
    assert (seen.problem, seen.checkpoints) == ("", 1000)
    assert seen.free > 0
    assert seen.speed > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints", "one"]
    assert look_at(Path("/proc/asyncrl"), 1 << 20).problem  # where nobody writes, not even root


def test_an_index_picks_its_files_among_others(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=2)
    whole = read_model(model, "model.path")
    (model / "consolidated.safetensors").write_bytes(b"of another form")
    assert read_model(model, "model.path") == whole
    (model / INDEX).unlink()
    assert read_model(model, "model.path").problems


def test_the_built_in_model_is_whole() -> None:
    files = read_model(catalog.resolve("builtin:tiny"), "model.path")
    assert (files.problems, sum(one.elements for one in files.weights)) == ([], 133_440)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 20))
def test_buckets_are_as_many_as_a_publish_plans(sizes: list[int], limit: int) -> None:
    tensors = [(str(number), torch.uint8, torch.Size([size])) for number, size in enumerate(sizes)]
    assert buckets(sizes, limit) == len(plan_buckets(tensors, limit))
