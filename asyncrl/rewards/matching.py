"""Rewards that compare an answer's text with a reference: quick, pure, and without a judge.

The reference is the field `answer_key` of the question's record. Extensions have more of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from asyncrl.rewards.parameters import Name
from asyncrl.rewards.reward import RewardInput


class Matching(ABC):
    """Base class: 1 for a match and 0 for none, or a degree of similarity."""

    inline = pure = True

    def __init__(self, answer_key: Name = "answer") -> None:
        self._answer_key = answer_key

    def __call__(self, answer: RewardInput) -> float:
        """Compare the last completion with the reference; from 0 to 1."""
        return self.match(answer.text, str(answer.field(self._answer_key)))

    @abstractmethod
    def match(self, text: str, reference: str) -> float:
        """Compare a text with a reference."""


class ExactMatch(Matching):
    """Match if the texts are equal, ignoring surrounding whitespace."""

    def match(self, text: str, reference: str) -> float:
        """Return 1 or 0."""
        return float(text.strip() == reference.strip())


class ContainsMatch(Matching):
    """Match if the answer contains the reference. An answer that lists every possibility matches too."""

    def match(self, text: str, reference: str) -> float:
        """Return 1 or 0."""
        return float(reference.strip() in text)


class NumberMatch(Matching):
    """Match if the last numbers of answer and reference are equal; also for solutions that end in "#### 72" (GSM8K)."""

    def match(self, text: str, reference: str) -> float:
        """Return 1 or 0."""
        found = last_number(text)
        return float(found is not None and found == last_number(reference))


def last_number(text: str) -> float | None:
    """Return the last number in decimal notation, with or without thousands separators."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(found[-1].replace(",", "")) if found else None
