"""The tests of a record and the code of an answer, as text.

asserts     a list of Python texts, each a separate test; each is preceded by the record's "test_setup_code" (MBPP)
check       the text of a function check(candidate); one test, called with the function that "entry_point" names
            (HumanEval)
programs    inputs and outputs of a program: [{"input": ..., "output": ...}, ...], {"inputs": [...], "outputs": [...]},
            or either as JSON text; a list of lines counts as a text (APPS, TACO)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import EpisodeFailed
from asyncrl.rewards.reward import RewardInput

Form = Literal["asserts", "check", "programs"]
Sources = list[str] | list[dict[str, str]]
KEYS: dict[Form, str] = {"asserts": "test_list", "check": "test", "programs": "input_output"}
PYTHON = ("", "python", "python3", "py")


class Tests:
    """Form and field of the tests in a record."""

    def __init__(self, form: Form, key: str | None) -> None:
        self._form, self._key = form, key or KEYS[form]

    def of(self, answer: RewardInput) -> Sources:
        """Return the tests of the answer's record. Raises EpisodeFailed if it has none, or tests of another form."""
        found = answer.field(self._key)
        tests: Sources
        if self._form == "asserts":
            setup = str(answer.record.get("test_setup_code") or "")
            tests = [f"{setup}\n{test}" for test in found]
        elif self._form == "check":
            tests = [f"{found}\n\ncheck({answer.field('entry_point')})\n"]
        else:
            tests = _pairs(found, self._key)
        if not tests:
            raise EpisodeFailed("reward_error", f"the record has no tests in {self._key!r}")
        return tests


def code_of(text: str) -> str:
    """Return the last fenced block of Python, even if the end of the answer cuts it off; without a fence, the whole
    text."""
    blocks: list[tuple[bool, list[str]]] = []  # whether it is Python, and its lines
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append((line.strip().strip("`").strip().lower() in PYTHON, []))
        elif inside:
            blocks[-1][1].append(line)
    if not blocks:
        return text
    return "\n".join(next((lines for python, lines in reversed(blocks) if python), []))


@cache
def modules(*names: str) -> list[tuple[str, str]]:
    """Return the names and sources of these modules, to be sent into a sandbox."""
    return [(f"asyncrl.extensions.code.{name}", Path(__file__).with_name(f"{name}.py").read_text()) for name in names]


def _pairs(found: Any, key: str) -> list[dict[str, str]]:
    try:
        found = json.loads(found) if isinstance(found, str) else found
        pairs = zip(found["inputs"], found["outputs"], strict=True) if isinstance(found, Mapping) else _both(found)
        return [{"input": _text(given), "output": _text(expected)} for given, expected in pairs]
    except (KeyError, TypeError, ValueError):
        raise EpisodeFailed("reward_error", f"{key!r} of the record has no pairs of input and output") from None


def _both(found: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    return [(one["input"], one["output"]) for one in found]


def _text(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else "\n".join(value)
