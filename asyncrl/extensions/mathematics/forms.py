"""Rewards for answers of a certain form: in a box, as the letter of a choice, in a few words, or after a pattern."""

from __future__ import annotations

import re
import string
from collections import Counter

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.rewards.matching import Matching
from asyncrl.rewards.parameters import Name
from asyncrl.rewards.reward import RewardInput

LETTERS = string.ascii_uppercase
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class FuzzyMatch(Matching):
    """F1 of the words that answer and reference share, normalized as in SQuAD: lower case, without punctuation,
    articles and extra whitespace (Rajpurkar et al., arXiv 1606.05250; its evaluate-v1.1.py)."""

    def match(self, text: str, reference: str) -> float:
        """Return a value from 0 to 1. It is symmetric in its arguments; two texts without words are equal."""
        ours, theirs = normalised(text).split(), normalised(reference).split()
        if not ours or not theirs:
            return float(ours == theirs)
        same = sum((Counter(ours) & Counter(theirs)).values())
        return 2.0 * same / (len(ours) + len(theirs))  # the harmonic mean of precision and recall


class ChoiceMatch(Matching):
    """Match if the answer chooses the right letter of a multiple-choice question. The letter is that of the last box,
    else of the last "answer is (C)" or "Answer: C", else of a text that is only the letter. The reference is a letter,
    or the index of an option, counted from 0."""

    def __init__(self, answer_key: Name = "answer", options: int = 10) -> None:
        """`options` is the number of letters, from A on, that are choices."""
        super().__init__(answer_key)
        if not 2 <= options <= len(LETTERS):
            raise ConfigError("options", options, f"Must be from 2 to {len(LETTERS)}.")
        self._letters = LETTERS[:options]
        letter = rf"[\s*(\[]*([{self._letters}])[)\]]?(?![\w'])"
        self._said = re.compile(rf"(?i:answer|choice|option)(?i:\s*(?:is|:|=))+{letter}")
        self._alone = re.compile(rf"{letter}[\s.*]*")

    def match(self, text: str, reference: str) -> float:
        """Return 1 or 0. Raises EpisodeFailed if the reference is not one of the choices."""
        wanted = reference.strip().strip("()[].").upper()
        if wanted.isdecimal() and int(wanted) < len(self._letters):
            wanted = self._letters[int(wanted)]
        if len(wanted) != 1 or wanted not in self._letters:
            raise EpisodeFailed("reward_error", f"{reference!r} is not one of the choices {self._letters}")
        return float(self.letter(text) == wanted)

    def letter(self, text: str) -> str | None:
        """Return the letter that an answer chooses, or None."""
        if (inside := last_boxed(text)) is not None:
            text = re.sub(r"^\\(?:text|mathrm|textbf)\s*\{(.*)\}$", r"\1", inside.strip())
        elif said := self._said.findall(text):
            return str(said[-1])
        alone = self._alone.fullmatch(text.strip())
        return alone[1] if alone else None


class BoxedMatch(Matching):
    r"""Match if the content of the last \boxed{...} equals the reference, ignoring whitespace."""

    def match(self, text: str, reference: str) -> float:
        """Return 1 or 0; 0 without a box."""
        inside = last_boxed(text)
        wanted = last_boxed(reference)
        return float(inside is not None and _squeezed(inside) == _squeezed(reference if wanted is None else wanted))


class FormatMatch:
    """Reward of 1 if a regular expression is found in the answer, where "." matches line breaks too; anchor it to
    restrict it.

    Python cannot interrupt a match: an expression that backtracks for long blocks the whole process, even from a
    thread.
    """

    inline = False
    pure = True

    def __init__(self, pattern: Name) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError("pattern", pattern, f"Not a regular expression: {error}.") from None

    def __call__(self, answer: RewardInput) -> float:
        """Return 1 or 0."""
        return float(self._pattern.search(answer.text) is not None)


def normalised(text: str) -> str:
    """Normalize a text as SQuAD does."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...}, including nested braces. Linear in the text's length."""
    open_braces: list[tuple[int, bool]] = []  # where each one begins, and whether it belongs to a box
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
