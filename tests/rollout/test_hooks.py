"""The hooks that come with the project, and how one is named."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.hooks import ends, has_signal, lowest_first
from asyncrl.user_code import load
from tests.fakes import group


def test_group_whose_rewards_are_all_equal_has_no_signal() -> None:
    assert has_signal(group(rewards=(0.0, 1.0))) is True
    assert has_signal(group(rewards=(1.0, 1.0))) == "no_signal"


def test_group_that_was_cut_off_altogether_is_truncated() -> None:
    assert ends(group(finish="stop")) is True
    assert ends(group(finish="length")) == "truncated"


def test_lowest_groups_go_first() -> None:
    assert [one.slot for one in lowest_first([group(number) for number in range(4)], 2)] == [0, 1]


@pytest.mark.parametrize("path", ["nowhere:f", "asyncrl.rollout.hooks:nothing", "asyncrl.rollout.hooks", ""])
def test_path_that_leads_nowhere_names_its_field(path: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.accept: got .* Must be an import path"):
        load(path, "rollout.accept")
