"""Tests of what agents in environments share."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.agents.playing import with_text

PARTS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a\n\nb"}]),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a", "name": "n"}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a\n\nb", "name": "n"}],
        ),
        ([{"role": "tool", "content": "a"}], [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]),
        ([{"role": "user", "content": PARTS}], [{"role": "user", "content": PARTS}, {"role": "user", "content": "b"}]),
    ],
)
def test_text_stands_in_the_users_last_message_or_its_own(messages: list[Any], expected: list[Any]) -> None:
    before = [dict(one) for one in messages]
    assert with_text(messages, "b") == expected
    assert messages == before
