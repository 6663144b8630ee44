"""Tests of which failures of an episode are retried."""

from __future__ import annotations

import pytest

from asyncrl.errors import EpisodeFailed


@pytest.mark.parametrize("reason", ["environment_error", "judge", "tool", "sandbox", "what a user names"])
def test_foreign_failures_are_retried_unless_they_object(reason: str) -> None:
    assert EpisodeFailed(reason).retry
    assert not EpisodeFailed(reason, retry=False).retry


@pytest.mark.parametrize("reason", ["agent_error", "reward_error"])
def test_errors_of_user_code_are_not_retried(reason: str) -> None:
    assert not EpisodeFailed(reason).retry
    assert EpisodeFailed(reason, retry=True).retry
