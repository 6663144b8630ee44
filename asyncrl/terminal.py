"""Text of strangers, in a terminal: what a model, a file or a program said must not steer it."""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline (ESC begins commands to a terminal), and what turns the direction of text."""


def visible(text: str) -> str:
    """The text, with its control characters as escapes of Python."""
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)
