"""Parsing of a judge's text into a number from 0 to 1.

The verdict is found by a regular expression (the group of its last match, because the judge may quote the answer
before) or as the field of the last JSON object that has it. It is either a number on a scale or one of several labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from asyncrl.errors import ConfigError
from asyncrl.rewards.parameters import Name, Range
from asyncrl.settings import Section

SCALE = (0.0, 10.0)
SCORE = r"(?i:score)\W*?(-?\d+(?:\.\d+)?)"
VERDICT = r"(?i:verdict)\W*(\w+)"


class VerdictSettings(Section):
    """How a verdict is read: "Score: N" from 0 to 10 by default; with `labels`, "Verdict: LABEL"."""

    pattern: Name | None = None
    """Regular expression with one group, the verdict."""
    json_field: Name | None = None
    """Field of the last JSON object that has it, in place of a pattern."""
    scale: Range | None = None
    """Lowest and highest number."""
    labels: Mapping[str, float] | None = None
    """Numbers from 0 to 1 by label."""


class VerdictParser:
    """Parser of verdicts."""

    def __init__(self, settings: VerdictSettings) -> None:
        labels = settings.labels
        if settings.pattern and settings.json_field:
            raise ConfigError("json_field", settings.json_field, "Cannot be combined with pattern.")
        if settings.scale and labels:
            raise ConfigError("labels", labels, "Cannot be combined with scale.")
        low, high = settings.scale or SCALE
        if not low < high:
            raise ConfigError("scale", [low, high], "Must be two numbers, the lower one first.")
        for label, value in (labels or {}).items():
            if not 0 <= value <= 1:
                raise ConfigError(f"labels.{label}", value, "Must be from 0 to 1.")
        self._field = settings.json_field
        self._low = low
        self._high = high
        self._labels = {label.lower(): value for label, value in labels.items()} if labels else None
        self._pattern = _compiled(settings.pattern or (VERDICT if labels else SCORE))

    def read(self, text: str) -> float | None:
        """Return a number from 0 to 1, or None if the text has no verdict, or one that is off the scale or an unknown
        label."""
        found = self._in_json(text) if self._field else self._in_text(text)
        if found is None:
            return None
        if self._labels is not None:
            return self._labels.get(str(found).strip().lower())
        try:
            value = float(found)
        except (TypeError, ValueError):
            return None
        return (value - self._low) / (self._high - self._low) if self._low <= value <= self._high else None

    def _in_text(self, text: str) -> str | None:
        found: list[str] = self._pattern.findall(text)
        return found[-1] if found else None

    def _in_json(self, text: str) -> str | float | None:
        decoder, start = json.JSONDecoder(), len(text)
        while (start := text.rfind("{", 0, start)) >= 0:
            try:
                found, _ = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            if self._field in found and not isinstance(found[self._field], bool):
                value: str | float | None = found[self._field]
                return value
        return None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError("pattern", pattern, f"Not a regular expression: {error}.") from None
    if compiled.groups != 1:
        raise ConfigError("pattern", pattern, "Must have one group, which contains the vote.")
    return compiled
