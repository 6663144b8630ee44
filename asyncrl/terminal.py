"""Display of untrusted text in a terminal: output of a model, a file or a program must not control it."""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline (ESC starts terminal commands), and characters that change the text
direction.
"""


def visible(text: str) -> str:
    """Return the text with its control characters as Python escapes."""
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)
