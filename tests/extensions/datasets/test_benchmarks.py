"""Public test sets are for evaluation alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.extensions.datasets.benchmarks import SETS as BENCHMARKS
from tests.fakes import OPTIONS, compose_values

EXPERIMENTS = [file for (group, _), file in OPTIONS.items() if group == "experiment"]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_no_experiment_trains_on_a_public_test_set(file: Path) -> None:
    """tests/test_config.py composes each, and the next test shows that none may train on what has this kind."""
    trained = re.findall(r"/task: (\w+)|/task@tasks\.\w+: (\w+)", file.read_text())
    assert not {name for names in trained for name in names} & BENCHMARKS.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_public_test_sets_are_for_evaluation(name: str) -> None:
    values = compose_values("experiment=tiny")
    task = {**values["task"], "kind": "benchmark", "name": name, "params": {}, "reward": "number"}
    values["eval"] |= {"questions": 1, "sets": {name: task}}
    assert load(values).eval_sets[name].name == name
    for trained, field in (({"task": task}, "task.kind"), ({"tasks": {"one": task}}, "tasks.one.kind")):
        with pytest.raises(ConfigError, match=f"{name} is a public test set: evaluate with it") as caught:
            load({**compose_values("experiment=tiny"), **trained})
        assert caught.value.field == field
