"""A value that stands in the environment is written by its name alone, by every writer of settings."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from asyncrl.config import Config, load
from asyncrl.config.secret_values import FREE, Parameters, Secret, closed, free_fields, opened, secrets
from asyncrl.errors import ConfigError
from asyncrl.launch.compose import plain
from asyncrl.launch.main import CONF
from tests.fakes import compose_values

VALUE = "sk-what-nobody-may-read"
PLACES = {
    "task.reward_params.headers.token": "task.reward_params",
    "task.params.key": "task.params",
    "task.agent_params.key": "task.agent_params",
    "agent_params.key": "agent_params",
}


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("A_KEY", VALUE)
    return "A_KEY"


def loaded(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base=None):
        return load(plain(compose("train", ["experiment=tiny", *overrides])))


def held(config: Config) -> dict[str, str]:
    return {field: str(secret) for field, secret in secrets(config)}


@pytest.mark.parametrize(
    ("written", "value"), [("${oc.env:A_KEY}", VALUE), ("Bearer ${oc.env:A_KEY}$", f"Bearer {VALUE}$")]
)
@pytest.mark.parametrize("place", PLACES)
def test_parameters_have_values_and_writings_have_names(place: str, written: str, value: str, key: str) -> None:
    config = loaded(f"+{place}='{written}'")
    assert held(config)[place] == value
    for text in (config.model_dump_json(), str(config.model_dump()), repr(config), str(config.model_copy(deep=True))):
        assert VALUE not in text
        assert key in text
    assert held(load(json.loads(config.model_dump_json())))[place] == value


def test_references_of_references_and_tools_are_kept_too(key: str) -> None:
    tools = "task.tools=[{use: mcp, command: [x], env: {KEY: '${oc.env:A_KEY}'}}]"
    again = "+task.agent_params.key=${task.reward_params.key}"
    config = loaded("+task.reward_params.key=${oc.env:A_KEY}", again, tools)
    assert set(held(config).values()) == {VALUE}
    assert len(held(config)) == 3
    assert VALUE not in config.model_dump_json()


def test_settings_that_are_no_parameters_have_the_value_itself(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "7")
    config = loaded("run.name=${oc.env:A_KEY}", "run.max_steps='${oc.decode:${oc.env:STEPS}}'")
    assert (config.run.name, config.run.max_steps) == (VALUE, 7)
    assert not held(config)
    default = loaded("+task.params.key=${oc.env:NO_SUCH,plain}")
    assert default.task.params["key"] == "plain"


def test_variable_that_is_missing_is_named() -> None:
    values = compose_values()
    values["task"]["reward_params"] = {"key": {"env": "NO_SUCH"}}
    expected = "task.reward_params.key: got {env: NO_SUCH}. The environment variable NO_SUCH is not set: export it"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load(values)


def test_parameters_named_env_are_left_alone() -> None:
    values = compose_values()
    values["task"]["params"] = {"env": "CartPole-v1", "more": {"env": {"A": "b"}}}
    assert load(values).task.params == values["task"]["params"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["env", "a", "b"]), inner),
)


@given(st.dictionaries(st.text(), JSON))
def test_what_is_opened_and_closed_is_as_before(parameters: dict[str, Any]) -> None:
    assert closed(opened(parameters)) == parameters


def test_secret_is_text_and_other_processes_get_it_plain(key: str) -> None:
    secret = Secret("Bearer ${A_KEY}")
    assert (str(secret), secret + "!", f"{secret}") == (f"Bearer {VALUE}", f"Bearer {VALUE}!", f"Bearer {VALUE}")
    assert copy.deepcopy([secret])[0] is secret
    sent = pickle.loads(pickle.dumps(secret))
    assert (type(sent), sent) == (str, f"Bearer {VALUE}")


def test_every_field_of_parameters_is_known_to_the_composition() -> None:
    found = set()
    schema = Config.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for name, field in section.get("properties", {}).items():
            kind = field.get("items", field)
            if kind.get("additionalProperties") is True:
                found.add(name)
    options = {"server_args", "sbatch"}  # of commands, which all can read
    assert found - options == set(FREE)


class Section(BaseModel):
    headers: Parameters
    label: str


def test_parameters_in_sections_of_extensions_are_known() -> None:
    assert free_fields([Section]) == {"headers"}
