"""What a replay starts, and what it is refused for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, LaunchError
from asyncrl.launch import precision
from asyncrl.launch.checks.run import require
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.plan import plan
from asyncrl.launch.prepare import Preparation
from tests.fakes import addresses, tiny_config
from tests.launch.checks.worlds import found

REPLAY = {"mode": "replay", "replay.from": "/runs/a"}


@pytest.mark.parametrize("schedule", [True, False])
def test_process_repeats_the_schedule_before_training(schedule: bool) -> None:
    config = tiny_config(**REPLAY, **{"replay.schedule": schedule})
    placement = place(config, imagined(config, 1, 0))
    specs = plan(config, replace(addresses(), **placement.urls()), placement, Path("/runs/r"))
    assert [spec.name for spec in specs] == [*(["rollout"] if schedule else []), "trainer-0"]
    assert ("asyncrl.extensions.replay.schedule_replay" in specs[0].argv) is schedule


def test_number_formats_are_those_of_the_recorded_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dtype": "bfloat16"}}))
    config = tiny_config(**{**REPLAY, "replay.from": str(tmp_path)})
    assert precision.recorded(config, tmp_path / "new") == {"trainer": {"dtype": "bfloat16"}}
    assert precision.recorded(tiny_config(**REPLAY), tmp_path / "new") is None


@pytest.mark.parametrize("changes", [{**REPLAY, "replay.from": "/nowhere"}, {"replay.compare": "/nowhere"}])
def test_missing_recording_is_a_finding_of_the_preflight(changes: dict[str, Any], tmp_path: Path) -> None:
    (field,) = changes.keys() - {"mode"}
    config = tiny_config(**changes)
    finding = found(config, tmp_path)[field]
    assert (finding.level, finding.value) == ("error", "/nowhere")
    assert "record=true" in finding.remedy
    with pytest.raises(LaunchError, match=field):
        require(Preparation(config, tmp_path / "run", cluster_of(config)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mode": "replay"}, "replay.from"),
        ({"replay.from": "/runs/a"}, "replay.from"),
        ({**REPLAY, "replay.schedule": True, "resume": "auto"}, "resume"),
        ({**REPLAY, "replay.schedule": True, "replay.loop": 2}, "replay.loop"),
        ({**REPLAY, "replay.schedule": True, "replay.keep": "a:b"}, "replay.keep"),
        ({**REPLAY, "replay.first": 2, "replay.last": 1}, "replay.last"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**changes)
    assert refused.value.field == field
    tiny_config(resume="auto", **REPLAY)
