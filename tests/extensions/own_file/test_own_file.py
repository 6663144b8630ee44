"""A user's own file of settings, and the schema with which an editor completes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from omegaconf import OmegaConf

from asyncrl import CONF
from asyncrl.errors import CompositionError
from asyncrl.extensions.own_file.own_file import arguments, schema, with_own_file
from asyncrl.launch import main as module
from asyncrl.launch.compose import algorithm_overrides
from tests.fakes import compose_values
from tests.forks import forked

OWN = """\
experiment: tiny
task: products
run: {name: mine, max_steps: 3}
trainer.optimizer.lr: 2e-3
rollout:
  stop: ["it's", 'back\\', "${run.name}"]
  group_size: 8
algo.loss: {name: gspo, clip_low: 3e-4}
algo.advantage: rloo
engine.server_args: {schedule_policy: fcfs}
agent_params: {options: [{deep: null}, 1.5, true]}
+task@eval.sets.harder: word_sorting
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "my_run.yaml"
    file.write_text(OWN)
    return file


def composed(*words: str) -> dict[str, Any]:
    return compose_values(*algorithm_overrides(with_own_file(words)))


def test_settings_of_an_own_file_are_those_of_the_run(own: Path) -> None:
    values = composed("--config", str(own))
    assert values["model"]["path"] == "builtin:tiny"  # of the experiment that it names
    assert values["task"]["name"] == "products"
    assert (values["run"]["name"], values["run"]["max_steps"]) == ("mine", 3)
    assert values["trainer"]["optimizer"]["lr"] == 2e-3
    assert values["rollout"]["stop"] == ["it's", "back\\", "mine"]
    assert values["algo"]["loss"] == {"name": "gspo", "clip_low": 3e-4}
    assert values["algo"]["advantage"]["name"] == "rloo"
    assert values["engine"]["server_args"]["schedule_policy"] == "fcfs"
    assert values["agent_params"] == {"options": [{"deep": None}, 1.5, True]}
    assert values["eval"]["sets"]["harder"]["name"] == "word_sorting"


def test_command_line_wins_over_the_own_file(own: Path) -> None:
    values = composed("run.max_steps=7", f"--config={own}", "task=copy", "algo.loss=cispo")
    assert values["run"]["max_steps"] == 7
    assert values["task"]["kind"] == "copy"
    assert values["algo"]["loss"] == {"name": "cispo"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [/experiment: tiny]", "name options of groups as settings"),
        ("- a", "it must hold settings"),
        ("a: [", "it is no YAML"),
    ],
)
def test_file_that_holds_no_settings_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(CompositionError, match=f"--config {file}.*{message}"):
        arguments(file)


def test_missing_file_and_missing_name_are_refused() -> None:
    with pytest.raises(CompositionError, match=r"--config /no/such\.yaml: it cannot be read"):
        with_own_file(["--config", "/no/such.yaml"])
    with pytest.raises(CompositionError, match="takes the path of one YAML file"):
        with_own_file(["--config"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {max_stalenes: 1}", "rollout.max_stalenes: got 1."),
        ("engine: {speculative: ngram}", "It was removed: speculative decoding is set by"),
        ("task: coppy", "Did you mean task=copy?"),
    ],
)
def test_misspelt_setting_in_a_file_ends_the_command_in_words(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    done = forked(module.main, "--check", "--config", "wrong.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def accepts(values: object) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(schema())).is_valid(values))


def test_schema_accepts_this_file_and_every_shipped_experiment(own: Path) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    validator.check_schema(validator.schema)
    for file in (own, *(CONF / "experiment").glob("*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        values.pop("defaults", None)
        assert not list(validator.iter_errors(values)), file


@pytest.mark.parametrize(
    "wrong", [{"rollout": {"max_stalenes": 1}}, {"model": "nope"}, {"modle": "tiny"}, {"algo.loss": "nope"}]
)
def test_schema_refuses_what_the_command_would(wrong: dict[str, Any]) -> None:
    assert not accepts(wrong)


def test_schema_explains_fields(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", "--schema"])
    module.main()
    found = json.loads(capsys.readouterr().out)
    assert "versions" in found["properties"]["rollout.max_staleness"]["description"]
