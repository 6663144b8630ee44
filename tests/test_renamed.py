"""Old names of settings work for one release: on the command line, in YAML files and in config.json of old runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl import renamed
from asyncrl.config import load, read
from asyncrl.launch import compose
from asyncrl.renamed import CHOICES, MOVED, RECIPES, RENAMED
from tests.fakes import compose_values, tiny_config

OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "algo.discount": (0.5, {"advantage": "gae"}),
    "algo.gae_lambda": (0.5, {"advantage": "gae"}),
    "algo.pass_k": (2, {"advantage": "pass_at_k"}),
    "algo.correct_above": (0.5, {"advantage": "pass_at_k"}),
    "algo.step_weight": (0.5, {"advantage": "{name: asyncrl_recipes.gigpo.advantage:gigpo, step_weight: 1.0}"}),
    "algo.critic_path": ("/critic", {}),
    "algo.critic_lr": (0.5, {}),
    "algo.critic_warmup": (3, {}),
    "algo.value_clip": (0.5, {}),
    "algo.overlong_buffer": (2, {}),
    "algo.overlong_penalty": (0.5, {}),
    "algo.length_penalty": (0.5, {}),
    "algo.reward_clip": (0.5, {}),
    "algo.normalize_rewards": (True, {}),
    "algo.mask_truncated": (True, {}),
    "algo.clip_low": (0.5, {}),
    "algo.clip_high": (0.5, {}),
    "algo.dual_clip": (3.5, {}),
    "algo.dppo_trust": (0.5, {"loss": "dppo_tv", "correction": None}),
    "algo.sapo_up": (0.5, {"loss": "sapo"}),
    "algo.sapo_down": (0.5, {"loss": "sapo"}),
    "algo.m2_threshold": (0.5, {"loss": "m2po", "correction": None}),
    "algo.correction_cap": (3.5, {}),
    "algo.correction_floor": (0.5, {}),
    "algo.mask_sequence": ([0.5, 2.0], {}),
    "algo.mask_geometric": ([0.5, 2.0], {}),
    "algo.mask_opsm": (0.5, {}),
    "algo.mask_lag": (2, {}),
    "algo.kl_coefficient": (0.5, {}),
    "algo.kl_estimator": ("k2", {}),
    "algo.kl_place": ("reward", {}),
    "algo.kl_meter_every": (3, {}),
    "algo.reference": ("teacher", {"teacher": "/t"}),
    "algo.reference_path": ("/reference", {}),
    "algo.reference_offload": (False, {}),
    "algo.distill_coefficient": (0.5, {"teacher": "/t"}),
    "algo.distill_place": ("loss", {}),
    "algo.distill_discount": (0.5, {}),
    "metrics.tensorboard": (False, {}),
}
"""A value that is not the default one, and what the algorithm must be for it to have an effect."""


def other(name: str) -> tuple[Any, dict[str, Any]]:
    value, needs = OTHER[name]
    fields = {"teacher.model" if field == "teacher" else f"algo.{field}": one for field, one in needs.items()}
    return value, fields


def meant(name: str, value: Any) -> Any:
    """Return what the old value means for the new setting."""
    return [] if name == "metrics.tensorboard" else value


def at(config: Any, name: str) -> Any:
    value: Any = json.loads(config.model_dump_json())
    for part in name.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("path", MOVED)
def test_moved_import_path_is_followed(path: str) -> None:
    old, new = f"{path}Name", f"{MOVED[path]}Name"
    assert renamed.overrides([f"agent={old}"]) == ([f"agent={new}"], [path])
    assert renamed.overrides([f"task.tools=[{{use: python, sandbox: {old}}}]"])[1] == [path]
    assert renamed.values({"task": {"kind": old}, "agent": "mine:Agent"}) == (
        {"task": {"kind": new}, "agent": "mine:Agent"},
        [path],
    )
    assert MOVED[path] in renamed.warning(path)


def test_moved_import_paths_lead_to_modules_that_exist() -> None:
    for new in (*MOVED.values(), *RECIPES.values()):
        module, _, name = new.rstrip(".").partition(":")
        found = importlib.import_module(module)
        assert not name or hasattr(found, name)


@pytest.mark.parametrize("name", RECIPES)
def test_estimator_that_became_a_recipe_is_followed(name: str) -> None:
    words, old = renamed.overrides([f"algo.advantage={name}"])
    assert old == [name]
    assert any(RECIPES[name] in word for word in words)
    for given in (name, {"name": name, "discount": 0.5}):
        values, old = renamed.values({"algo": {"advantage": given}})
        assert old == [name]
        assert RECIPES[name] in str(values["algo"]["advantage"])
    assert RECIPES[name] in renamed.warning(name)


@pytest.mark.parametrize("name", RECIPES)
def test_configuration_of_an_old_run_with_such_an_estimator_is_read(name: str) -> None:
    """It holds the settings of all estimators."""
    old = {"advantage": name, "discount": 0.9, "gae_lambda": 0.8, "pass_k": 2, "correct_above": 0.5, "step_weight": 0.7}
    values = compose_values("experiment=tiny")
    values["algo"] |= old
    assert load(values).algo.advantage.model_dump() == {"name": RECIPES[name], "discount": 0.9, "step_weight": 0.7}


def test_every_old_name_has_a_case() -> None:
    assert OTHER.keys() == RENAMED.keys()


@pytest.mark.parametrize("name", RENAMED)
def test_old_name_sets_the_new_field_on_the_command_line(name: str) -> None:
    value, needs = other(name)
    words = [f"{field}={'null' if one is None else one}" for field, one in needs.items()]
    found, old = renamed.overrides([*words, f"{name}={json.dumps(value)}"])
    assert old == [name]
    config = load(compose_values("experiment=tiny", *found))
    assert at(config, RENAMED[name]) == meant(name, value)
    assert at(load(compose_values("experiment=tiny", *words)), RENAMED[name]) != value


@pytest.mark.parametrize("name", RENAMED)
def test_old_name_sets_the_new_field_in_old_files(name: str) -> None:
    value, needs = other(name)
    needs = {field: yaml.safe_load(one) if isinstance(one, str) else one for field, one in needs.items()}
    plain = tiny_config(**needs).model_dump(mode="json")
    old = json.loads(json.dumps(plain))
    place, _, setting = RENAMED[name].rpartition(".")
    section = old
    for part in place.split("."):
        section = section[part]
    del section[setting]
    if place in CHOICES:  # an old file has the name alone
        old["algo"][place.removeprefix("algo.")] = section["name"]
    package, _, last = name.partition(".")
    old[package][last] = value
    assert at(load(old), RENAMED[name]) == meant(name, value)
    assert renamed.values(old)[1] == [name]


def test_configuration_of_an_old_run_is_read_without_what_had_no_effect(tmp_path: Path) -> None:
    """Old files hold the settings of all algorithms."""
    now = tiny_config().model_dump(mode="json")
    algo = now.pop("algo")
    flat = {name: one for name, one in algo.items() if not isinstance(one, dict)}
    values = {name: value for name, (value, _) in OTHER.items() if name.startswith("algo.")}
    values |= {"algo.reference": "weights", "algo.distill_coefficient": 0.0, "algo.distill_discount": 0.0}
    old = {name.removeprefix("algo."): value for name, value in values.items()}
    chosen = {"advantage": "grpo", "loss": "ppo", "correction": None}
    (tmp_path / "config.json").write_text(json.dumps({**now, "algo": {**flat, **old, **chosen}}))
    config = read(tmp_path)
    assert config.algo.loss.settings == {"clip_low": 0.5, "clip_high": 0.5, "dual_clip": 3.5}
    assert config.algo.advantage.settings == {}
    assert config.algo.correction is None
    assert config.algo.mask.sequence == (0.5, 2.0)


def test_new_name_wins_over_the_old_one() -> None:
    values = compose_values("algo.loss.clip_low=0.1")
    values["algo"]["clip_low"] = 0.5
    assert load(values).algo.loss.settings["clip_low"] == 0.1
    assert values["algo"]["clip_low"] == 0.5  # the values given are not changed


def test_command_warns_of_old_names_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from asyncrl.launch.main import CONF

    arguments = ["algo.clip_low=0.1", "algo.kl_place=reward", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", *arguments])
    (composed,) = compose.compose(CONF)
    assert composed.values["algo"]["loss"]["clip_low"] == 0.1
    told = capsys.readouterr().err
    assert told.count("WARNING") == 2
    assert "algo.clip_low is called algo.loss.clip_low now" in told
