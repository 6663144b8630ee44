"""A schedule is repeated by a process in the place of the rollout process; nobody else does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import lookup
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.plan import plan
from tests.fakes import addresses, tiny_config

REPLAY = {"mode": "replay", "replay.from": "/runs/a"}


@pytest.mark.parametrize("schedule", [True, False])
def test_a_process_repeats_the_schedule_before_the_trainers_train(schedule: bool) -> None:
    config = tiny_config(**REPLAY, **{"replay.schedule": schedule})
    placement = place(config, imagined(config, 1, 0))
    specs = plan(config, replace(addresses(), **placement.urls()), placement, Path("/runs/r"))
    assert [spec.name for spec in specs] == [*(["rollout"] if schedule else []), "trainer-0"]
    assert ("asyncrl.extensions.debug.schedule_replay" in specs[0].argv) is schedule


@pytest.mark.parametrize("setting", [{**REPLAY, "replay.schedule": True}, {"replay.compare": "/runs/a"}])
def test_settings_are_refused_where_no_extension_serves_them(
    setting: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config(**setting)
    others = {name: path for name, path in lookup.shipped().items() if name != "debug"}
    monkeypatch.setattr(lookup, "shipped", lambda: others)
    with pytest.raises(ConfigError, match=r"replay\.(schedule|compare): .* No extension that is installed does this"):
        tiny_config(**setting)
