"""What weights.overlap refuses: before anything starts, by field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from tests.fakes import ALONE, GIVEN, tiny_config

OVERLAP = {"weights.overlap": True, "rollout.max_staleness": 2, "rollout.lead": None}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        (ALONE, "mode", "without a trainer"),
        ({"weights.staging": "stream"}, "weights.staging", "set full or auto"),
        ({"rollout.lead": 0}, "rollout.lead", "set at least 1"),
        ({"rollout.max_staleness": 0}, "rollout.max_staleness", "set at least 1"),
    ],
)
def test_settings_without_room_for_an_overlap_are_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**OVERLAP | changes)
    assert refused.value.field == field
    assert remedy in str(refused.value)
    assert "weights.overlap=false" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.batch_parts": 2, "rollout.batch_groups": 4},
        {"weights.pause_mode": "drain"},
        {"rollout.max_staleness": 1},
        {"rollout.over_age": "drop"},
        {**GIVEN, "deterministic": True},
    ],
)
def test_other_settings_fit_an_overlap(changes: dict[str, Any]) -> None:
    tiny_config(**OVERLAP | changes)
