"""An extension by import path has settings, rules and hooks; what is wrong about it is refused by field and remedy."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from asyncrl import extension, imports
from asyncrl.config import Config, load
from asyncrl.errors import ConfigError
from asyncrl.observability.timeline import GroupTimeline, PublishTimeline
from asyncrl.removed import renamed
from tests.fakes import tiny_config, tiny_values

PAGE = (Path(__file__).parents[1] / "docs" / "extensions.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
assert CODE


@pytest.fixture(autouse=True)
def sleepy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the page's example importable."""
    (tmp_path / "sleepy.py").write_text(CODE[1])
    monkeypatch.syspath_prepend(tmp_path)


def configured(**changes: object) -> Config:
    return tiny_config(extensions={"sleepy": "sleepy:Sleepy"}, **changes)


def test_the_example_of_the_page_adds_a_setting_a_listener_and_a_metric_in_forty_lines() -> None:
    assert CODE[1].count("\n") <= 40
    made = extension.active(configured(sleepy={"slow": 2.0}))["sleepy"]
    hooks = made.rollout()
    for seconds in (1.0, 3.0, 9.0):
        hooks.record(GroupTimeline("g", 0, "task", "training", 0, 100.0, 100.0 + seconds, "committed", []))
    hooks.record(PublishTimeline(1, 0.0, 50.0))
    assert hooks.figures() == {"sleepy/slow": 2.0}
    assert hooks.figures() == {"sleepy/slow": 0.0}
    hooks = made.trainer(None)  # type: ignore[arg-type]
    assert (hooks.before_update(None), hooks.after_update(1), hooks.state()) == ((), {}, None)  # type: ignore[arg-type]


def test_settings_have_defaults_and_survive_the_way_to_other_processes() -> None:
    assert configured().sleepy.slow == 60.0
    config = configured(sleepy={"slow": 1.5})
    again = load(json.loads(config.model_dump_json()))
    assert again == config
    assert again.sleepy.slow == 1.5


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"sleepy": {"slow": -1.0}}, "sleepy.slow", "greater than 0"),
        ({"sleepy": {"fast": 1.0}}, "sleepy.fast", "No such field"),
        ({"sleepy": {"slow": 1e9}}, "sleepy.slow", "batch_timeout"),  # the extension's own rule
        ({"extensions": {"sleepy": "sleepy:Nobody"}}, "extensions.sleepy", "import path"),
        ({"extensions": {"sleepy": "sleepy:Hooks"}}, "extensions.sleepy", "subclass"),
        ({"extensions": {"rollout": "sleepy:Sleepy"}}, "extensions.rollout", "choose another"),
        ({"extensions": {}, "sleepy": {"slow": 1.0}}, "sleepy", "no extension has this name"),
    ],
)
def test_what_is_wrong_is_refused_by_field(changes: dict[str, object], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**{"extensions": {"sleepy": "sleepy:Sleepy"}, **changes})
    assert refused.value.field == field
    assert remedy in refused.value.remedy


def test_extension_of_an_installed_package_need_not_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints([EntryPoint("sleepy", "sleepy:Sleepy", extension.GROUP)])
    monkeypatch.setattr(extension, "entry_points", lambda group: found.select(group=group))
    extension.installed.cache_clear()
    try:
        assert load({**tiny_values(), "sleepy": {"slow": 3.0}}).sleepy.slow == 3.0
    finally:
        extension.installed.cache_clear()


def test_old_names_of_settings_are_refused_with_the_new_ones_and_read_in_recorded_runs() -> None:
    moved = {"tracing": "observe", "rollout.processes": "processes.count"}
    for old, new in moved.items():
        with pytest.raises(ConfigError, match=f"It moved: set {new}"):
            tiny_config(**{old: {}})
    recorded = {"tracing": {"engines": True}, "rollout": {"processes": 2, "lead": 1}, "mode": "train"}
    found = {"observe": {"engines": True}, "processes": {"count": 2}, "rollout": {"lead": 1}, "mode": "train"}
    assert renamed(recorded) == found
    assert recorded["rollout"] == {"processes": 2, "lead": 1}


def test_old_name_of_a_module_that_moved_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"asyncrl\.extensions\.proxy\.agents:Proxied"):
        imports.load("asyncrl.agents.proxied:Proxied", "agent")
