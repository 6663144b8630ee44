"""The command's --check, and what a run does by itself: all findings are told, and at an error nothing starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extension import Extension, LaunchHooks
from asyncrl.launch.checks import versions
from asyncrl.launch.checks.findings import Finding, error, failed, ok, rendered, warning
from asyncrl.launch.checks.model_files import INDEX, read_model
from asyncrl.launch.checks.run import preflight, require
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.prepare import KEY, Preparation, run_key
from asyncrl.models import catalog
from asyncrl.user_code import announce
from tests.fakes import ALONE, JOB, tiny_config, with_scorer
from tests.launch.checks.worlds import TENSORS, command, found, job, write_model, write_shard


def test_the_command_tells_and_leaves_nothing(tmp_path: Path) -> None:
    catalog.resolve("builtin:tiny")  # making it is told of
    done = command("--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "preflight: 0 error(s)" in done.stdout
    assert "ok       model.path" in done.stdout
    assert list(tmp_path.iterdir()) == []


class Checking(Extension):
    """Reports what tasks have announced."""

    def launch(self) -> LaunchHooks:
        return CheckingHooks()


class CheckingHooks(LaunchHooks):
    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        if gpus:
            yield ConfigError("gpus", gpus, "Use none.")

    def refuse(self, prepared: Preparation) -> None:
        if prepared.config.run.max_steps == 7:
            raise ConfigError("run.max_steps", 7, "Choose another number.")

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        yield error("servers", f"{prepared.announced} on {len(prepared.cluster.nodes)} machine", "Start them.")

    def notes(self, prepared: Preparation) -> list[str]:
        return [f"{len(prepared.announced)} servers"]

    def begins(self, prepared: Preparation) -> None:
        machine = json.loads((prepared.run_dir / "machine.json").read_text())
        (prepared.run_dir / "servers.json").write_text(json.dumps(sorted(machine["dtype"])))


class Announcing:
    """A task that uses a server."""

    size = None

    def __init__(self) -> None:
        announce("a server")

    def question(self, index: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "1"}]}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return 0.0


def test_extension_checks_what_a_task_announces(tmp_path: Path) -> None:
    task = {"task.kind": f"{__name__}:Announcing", "task.params": {}}
    config = tiny_config(extensions={"checking": f"{__name__}:Checking"}, **task)
    prepared = Preparation(config, tmp_path / "run", cluster_of(config))
    findings = preflight(prepared)
    assert failed(findings)
    assert {one.field: one.value for one in findings}["servers"] == "['a server'] on 1 machine"
    assert "1 servers" in prepared.notes()
    (tmp_path / "run").mkdir()
    prepared.begins()
    assert (tmp_path / "run" / "servers.json").read_text() == '["engine", "trainer"]'
    announce("nobody listens")
    assert prepared.announced == ["a server"]


def test_run_refused_by_an_extension_is_not_started(tmp_path: Path) -> None:
    config = tiny_config(extensions={"checking": f"{__name__}:Checking"}, **{"run.max_steps": 7})
    findings = preflight(Preparation(config, tmp_path / "run", cluster_of(config)))
    assert [one.level for one in findings if one.field == "run.max_steps" and one.value == "7"] == ["error"]
    with pytest.raises(ConfigError, match="Choose another number"):
        Preparation(config, tmp_path / "run", cluster_of(config)).all()


def test_extension_checks_the_model_with_the_gpu_count(tmp_path: Path) -> None:
    extensions = {**JOB["extensions"], "checking": f"{__name__}:Checking"}
    for gpus in (0, 8):
        findings = found(job(extensions=extensions, **{"cluster.gpus": gpus, "cluster.nodes": 2}), tmp_path)
        assert ("gpus" in findings) == (gpus > 0)


def test_failing_run_is_not_started_nor_its_folder_touched(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    for arguments in (("--check",), ("cluster.preflight=true",)):
        done = command(f"model.path={model}", *arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert "has no tokenizer" in " ".join(done.stdout.split())  # lines are filled
        assert not (tmp_path / "run").exists()
    assert "model.path (cluster.preflight)" in done.stderr


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"trainer.tensor_parallel": 3}, "trainer.tensor_parallel", "Must divide"),
        ({"model.path": "/nowhere"}, "model.path", "Give a folder"),
        ({"trainer.device": "cuda"}, "trainer.device", "use cpu or auto"),
        ({"cluster.interface": "nosuch0", "cluster.host": None}, "cluster.interface", "choose one"),
        ({"model.chat_template": "/nowhere"}, "model.chat_template", "path of a jinja file"),
        ({"agent": "asyncrl.agents.single_turn:Missing"}, "agent", "module:name"),
        ({"task.agent": "no_such_module:Agent"}, "task.agent", "No module named"),
        ({"agent": "asyncrl.agents.single_turn:SingleTurn.run"}, "agent", "module:name"),
    ],
)
def test_what_a_launch_would_refuse_is_a_finding(
    changes: dict[str, object], field: str, remedy: str, tmp_path: Path
) -> None:
    config = tiny_config(**changes)
    findings = found(config, tmp_path)
    assert findings[field].level == "error"
    assert remedy in findings[field].remedy
    with pytest.raises(LaunchError, match=field):
        require(Preparation(config, tmp_path / "run", cluster_of(config)))


def test_an_error_that_several_steps_meet_is_told_once(tmp_path: Path) -> None:
    config = tiny_config(**{"task.kind": "file", "task.reward": "exact", "task.train_file": "/nowhere.jsonl"})
    findings = preflight(Preparation(config, tmp_path / "run", cluster_of(config)))
    assert [one.field for one in findings if one.level == "error"] == ["task.train_file"]


def test_a_job_to_come_is_placed_on_machines_that_are_imagined(tmp_path: Path) -> None:
    config = job(**{"cluster.gpus": 8, "trainer.data_parallel": 8, "engine.count": 8})
    findings = found(config, tmp_path)
    assert not failed(list(findings.values()))
    assert "a job of 2 machine(s)" in findings["cluster.launcher"].value


def test_dtype_of_a_future_job_is_decided_on_its_machines(tmp_path: Path) -> None:
    auto = {"trainer.dtype": "auto", "engine.dtype": "auto"}
    cpus = found(job(**{"cluster.gpus": 0, "cluster.nodes": 1, **auto}), tmp_path)
    assert cpus["trainer.dtype"].value == "auto: decided by the job's machines when it starts"
    gpus = found(job(**{"cluster.gpus": 8, "cluster.nodes": 1, **auto}), tmp_path)
    assert gpus["engine.dtype"].value == "bfloat16, auto: it runs on GPUs"


def test_check_tells_the_dtype_with_its_reason(tmp_path: Path) -> None:
    told = found(tiny_config(**{"trainer.dtype": "auto"}), tmp_path)
    assert "(measured)" in told["trainer.dtype"].value
    assert (told["engine.dtype"].level, told["engine.dtype"].value[:7]) == ("ok", "float32")


def test_without_trainers_nothing_is_said_of_them(tmp_path: Path) -> None:
    findings = found(tiny_config(**ALONE), tmp_path)
    assert findings["engine.dtype"].level == "ok"
    assert "trainer.dtype" not in findings


def test_model_is_looked_for_wherever_its_engines_run(tmp_path: Path) -> None:
    elsewhere = {"scorer.model": "builtin:tiny", "scorer.urls": ["http://10.0.0.9:1"]}
    assert "scorer.model" not in found(with_scorer(**elsewhere), tmp_path)
    nowhere = found(with_scorer(**elsewhere | {"scorer.model": "/nowhere"}), tmp_path)
    assert nowhere["scorer.model"].level == "error"


def test_models_of_other_families_are_looked_at_by_their_files(tmp_path: Path) -> None:
    model = write_model(tmp_path / "scorer")
    (model / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    findings = found(with_scorer(**{"scorer.model": str(model)}), tmp_path)
    assert findings["scorer.model"].level == "ok"
    (model / "model.safetensors").unlink()
    assert found(with_scorer(**{"scorer.model": str(model)}), tmp_path)["scorer.model"].level == "error"


def test_an_index_picks_its_files_among_others(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=2)
    whole = read_model(model, "model.path")
    assert sorted(whole.weights) == sorted(TENSORS)
    assert whole.nbytes == sum(file.stat().st_size for file in model.glob("*.safetensors"))
    (model / "consolidated.safetensors").write_bytes(b"of another form")
    assert read_model(model, "model.path") == whole
    (model / INDEX).unlink()
    assert read_model(model, "model.path").problems


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    whole = read_model(model, "model.path")
    write_shard(model / "empty.safetensors", {})
    found = read_model(model, "model.path")
    assert (found.weights, found.problems) == (whole.weights, [])


def test_packages_that_are_missing_are_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MUST_MATCH", ("torch", "no-such-package"))
    assert "torch" in versions.installed()
    assert "no-such-package" not in versions.installed()


def test_key_is_a_new_one_unless_engines_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = {"engine.urls": ["http://10.0.0.9:30000"], "engine.count": 0}
    monkeypatch.setenv(KEY, "theirs")
    assert run_key(tiny_config(**attached)) == "theirs"
    mine = [run_key(tiny_config()) for _ in range(2)]
    assert mine[0] != mine[1]
    assert "theirs" not in mine
    monkeypatch.delenv(KEY)
    assert len(run_key(tiny_config(**attached))) == 48


def test_the_built_in_model_is_whole() -> None:
    files = read_model(catalog.resolve("builtin:tiny"), "model.path")
    assert (files.problems, sum(map(math.prod, files.weights.values()))) == ([], 133_440)


def test_errors_are_told_last() -> None:
    found = [error("b", "wrong", "mend it"), ok("a", "fine"), warning("c", "odd", "look"), ok("d", "fine")]
    words = [line.split()[0] for line in rendered(found).splitlines() if not line.startswith(" ")]
    assert words == ["ok", "ok", "warning", "error", "preflight:"]
