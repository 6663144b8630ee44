"""Answers that are compared with a reference by their text: quick, pure, and without a judge.

The reference is a field of the question's record, `answer_key`.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.rewards.parameters import Name
from asyncrl.rewards.reward import Answer

LETTERS = string.ascii_uppercase
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Matching(ABC):
    """1 for a match and 0 for none, or how close it comes."""

    inline = pure = True

    def __init__(self, answer_key: Name = "answer") -> None:
        self._answer_key = answer_key

    def __call__(self, answer: Answer) -> float:
        """From 0 to 1."""
        return self.match(answer.text, str(answer.field(self._answer_key)))

    @abstractmethod
    def match(self, text: str, reference: str) -> float:
        """Of an answer's text."""


class Exact(Matching):
    """The same text, but for white space around it."""

    def match(self, text: str, reference: str) -> float:
        """1 or 0."""
        return float(text.strip() == reference.strip())


class Contains(Matching):
    """The reference stands somewhere in the answer. An answer that says everything gets it too."""

    def match(self, text: str, reference: str) -> float:
        """1 or 0."""
        return float(reference.strip() in text)


class Number(Matching):
    """The last number of the answer is the last of the reference: also for solutions that end in "#### 72" (GSM8K)."""

    def match(self, text: str, reference: str) -> float:
        """1 or 0."""
        found = last_number(text)
        return float(found is not None and found == last_number(reference))


class Fuzzy(Matching):
    """F1 of the words that answer and reference share, normalised as SQuAD does: lower case, without punctuation,
    articles and white space (Rajpurkar et al., arXiv 1606.05250; its evaluate-v1.1.py)."""

    def match(self, text: str, reference: str) -> float:
        """From 0 to 1, the same if the two change places; two texts without a word are equal."""
        ours, theirs = normalised(text).split(), normalised(reference).split()
        if not ours or not theirs:
            return float(ours == theirs)
        same = sum((Counter(ours) & Counter(theirs)).values())
        return 2.0 * same / (len(ours) + len(theirs))  # the harmonic mean of precision and recall


class Choice(Matching):
    """The letter of a multiple choice: that of the last box, else the last "answer is (C)" or "Answer: C", else a text
    that is nothing but the letter. The reference is a letter, or the number of an option, counted from 0."""

    def __init__(self, answer_key: Name = "answer", options: int = 10) -> None:
        """`options`: how many letters, from A on, are choices."""
        super().__init__(answer_key)
        if not 2 <= options <= len(LETTERS):
            raise ConfigError("options", options, f"Must be from 2 to {len(LETTERS)}.")
        self._letters = LETTERS[:options]
        letter = rf"[\s*(\[]*([{self._letters}])[)\]]?(?![\w'])"
        self._said = re.compile(rf"(?i:answer|choice|option)(?i:\s*(?:is|:|=))+{letter}")
        self._alone = re.compile(rf"{letter}[\s.*]*")

    def match(self, text: str, reference: str) -> float:
        """1 or 0. Raises EpisodeFailed when the reference is no choice."""
        wanted = reference.strip().strip("()[].").upper()
        if wanted.isdecimal() and int(wanted) < len(self._letters):
            wanted = self._letters[int(wanted)]
        if len(wanted) != 1 or wanted not in self._letters:
            raise EpisodeFailed("reward_error", f"{reference!r} is none of the choices {self._letters}")
        return float(self.letter(text) == wanted)

    def letter(self, text: str) -> str | None:
        """The letter that an answer chooses."""
        if (inside := last_boxed(text)) is not None:
            text = re.sub(r"^\\(?:text|mathrm|textbf)\s*\{(.*)\}$", r"\1", inside.strip())
        elif said := self._said.findall(text):
            return str(said[-1])
        alone = self._alone.fullmatch(text.strip())
        return alone[1] if alone else None


class Boxed(Matching):
    r"""What stands in the last \boxed{...} is the reference, but for white space."""

    def match(self, text: str, reference: str) -> float:
        """1 or 0; 0 without a box."""
        inside = last_boxed(text)
        wanted = last_boxed(reference)
        return float(inside is not None and _squeezed(inside) == _squeezed(reference if wanted is None else wanted))


class Format:
    """1 for an answer in which a regular expression is found, with "." for line breaks too; anchor it to say more.

    Python cannot end a match: an expression that backtracks for long holds up the whole process, in a thread as
    well."""

    inline = False
    pure = True

    def __init__(self, pattern: Name) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError("pattern", pattern, f"Not a regular expression: {error}.") from None

    def __call__(self, answer: Answer) -> float:
        """1 or 0."""
        return float(self._pattern.search(answer.text) is not None)


MATCHES: dict[str, Callable[[str, str], float]] = {
    "exact": Exact().match,
    "contains": Contains().match,
    "number": Number().match,
}
"""By name, for tasks that know text and reference alone."""


def last_number(text: str) -> float | None:
    """The last number in decimal notation, with or without commas for thousands."""
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(found[-1].replace(",", "")) if found else None


def normalised(text: str) -> str:
    """As SQuAD compares answers."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} that is closed, braces within it included. Linear in the text's length."""
    open_braces: list[tuple[int, bool]] = []  # where each began, and whether it is a box's
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            open_braces.append((token.end(), len(token[0]) > 1))
        elif token[0] == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed and (last is None or start > last[0]):
                last = start, token.start()
    return text[slice(*last)] if last else None


def _squeezed(text: str) -> str:
    return "".join(text.split())
