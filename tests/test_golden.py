"""The comparison of `make golden` finds every difference but those that are named."""

from __future__ import annotations

from tests.golden.__main__ import compare

BEFORE = {"config/tiny/rollout.old": "1", "replay/ppo/0/loss": '"0x1p0"', "metric/reward": '""'}


def test_nothing_changes_unnoticed() -> None:
    after = {"replay/ppo/0/loss": '"0x1p1"', "metric/reward": '""', "metric/new": '""'}
    expected = ["gone: config/tiny/rollout.old", 'new: metric/new = ""', 'replay/ppo/0/loss: "0x1p0" -> "0x1p1"']
    assert compare(BEFORE, after, {}) == expected


def test_named_differences_pass_and_no_others() -> None:
    after = {"config/tiny/rollout.young": "1", "replay/ppo/0/loss": '"0x1p0"'}
    changes = {"removed": {"metric/*": "it gained nothing"}, "renamed": {r"rollout\.old$": "rollout.young"}}
    assert compare(BEFORE, after, changes) == []
    assert compare(BEFORE, {**after, "config/tiny/rollout.young": "2"}, changes) == [
        "config/tiny/rollout.young: 1 -> 2"
    ]
