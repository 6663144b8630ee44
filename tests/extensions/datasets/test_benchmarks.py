"""Public test sets are for evaluation alone."""

from __future__ import annotations

import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.extensions.datasets.benchmarks import SETS as BENCHMARKS
from tests.fakes import OPTIONS, compose_values, missing

EXPERIMENTS = sorted(name for group, name in OPTIONS if group == "experiment")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_trains_on_a_public_test_set(name: str) -> None:
    config = load(compose_values(f"experiment={name}", *missing(name)))
    assert not {task.name for task in config.mixture.values()} & BENCHMARKS.keys()
    assert all(task.kind != "benchmark" for task in config.mixture.values())


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
