"""What trainer.batch_parts refuses: before anything starts, by field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.algo.advantage import AdvantageTraits
from asyncrl.algo.loss import LossTraits
from asyncrl.config.rules import check_traits
from asyncrl.errors import ConfigError
from tests.fakes import reusing, tiny_config

PARTS = {"rollout.batch_groups": 4, "trainer.batch_parts": 4}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"trainer.batch_parts": 5}, "trainer.batch_parts", "rollout.batch_groups=4 groups: set at most 4"),
        ({"algo.mini_batches": 2}, "algo.mini_batches", "into a single step"),
        ({"algo.epochs": 2}, "algo.epochs", "into a single step"),
        ({"algo.advantage": "reinforce_pp"}, "algo.advantage", "needs the whole batch"),
        ({"algo.shaping.normalize": True}, "algo.shaping.normalize", "needs the whole batch"),
        (reusing(groups=2), "sample_reuse.groups", "added to a whole batch"),
        ({"rollout.over_age": "drop"}, "rollout.over_age", "when a batch is complete"),
        ({"deterministic": True, "rollout.max_staleness": 0, "rollout.lead": None}, "deterministic", "Timing decides"),
    ],
)
def test_settings_that_need_a_whole_batch_are_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**PARTS | changes)
    assert refused.value.field == field
    assert remedy in str(refused.value)
    assert "trainer.batch_parts" in str(refused.value)
    tiny_config(**PARTS | changes | {"trainer.batch_parts": 1})


def test_own_estimator_that_compares_groups_is_refused() -> None:
    config = tiny_config(**PARTS)
    check_traits(config, AdvantageTraits(), LossTraits())
    with pytest.raises(ConfigError, match="needs the whole batch"):
        check_traits(config, AdvantageTraits(whole_batch=True), LossTraits())
