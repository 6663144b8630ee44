"""Small functions to write, made up by number, with asserts: task.kind=asyncrl.tasks.programs:Programs reward=code.

The record has "test_list", as MBPP's (asyncrl/rewards/code_tests.py), so that a run may train on these and be measured
by a public set that it has never seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ASSERTS = 4
"""Of each program; the first is shown."""


@dataclass(frozen=True)
class Program:
    """What a function is to do, what it does, and arguments for it."""

    asked: str
    does: Callable[[Any], Any]
    argument: Callable[[random.Random], Any]


class Programs:
    """Endless: the index says which of KINDS, and seeds the rest."""

    inline = True

    def question(self, index: int) -> dict[str, Any]:
        """Same index, same program."""
        draw = random.Random(index)
        program = KINDS[index % len(KINDS)](draw)
        arguments = [program.argument(draw) for _ in range(ASSERTS)]
        tests = [f"assert f({argument!r}) == {program.does(argument)!r}" for argument in arguments]
        asked = (
            f"Write a Python function f of one argument that returns {program.asked}. Your code must pass this test:\n"
            f"{tests[0]}\nAnswer with the code alone, in a ```python block."
        )
        return {"messages": [{"role": "user", "content": asked}], "test_list": tests}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        """Only its tests can say: set reward=code."""
        raise NotImplementedError("task.reward must be code")


def number(draw: random.Random) -> int:
    """An argument."""
    return draw.randrange(-20, 100)


def numbers(draw: random.Random) -> list[int]:
    """An argument."""
    return [number(draw) for _ in range(draw.randrange(1, 8))]


def words(draw: random.Random) -> str:
    """An argument."""
    return " ".join("".join(draw.choices("abcde", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 5)))


def linear(draw: random.Random) -> Program:
    """A number times one, plus another."""
    factor, more = draw.randrange(2, 30), draw.randrange(1, 100)
    return Program(f"{factor} times its argument plus {more}", lambda x: factor * x + more, number)


def divisible(draw: random.Random) -> Program:
    """The sum of some numbers of a list."""
    by = draw.randrange(2, 9)
    return Program(
        f"the sum of the numbers in a list that {by} divides", lambda x: sum(n for n in x if n % by == 0), numbers
    )


def above(draw: random.Random) -> Program:
    """How many numbers of a list are large."""
    least = draw.randrange(0, 60)
    return Program(f"how many numbers of a list are above {least}", lambda x: sum(n > least for n in x), numbers)


def furthest(draw: random.Random) -> Program:
    """One number of a list."""
    of = draw.randrange(-10, 60)
    return Program(
        f"the largest distance of a number in a list from {of}", lambda x: max(abs(n - of) for n in x), numbers
    )


def occurs(draw: random.Random) -> Program:
    """How often a letter stands in a text."""
    letter = draw.choice("abcde")
    return Program(f"how often the letter {letter} occurs in a text", lambda x: x.count(letter), words)


def without(draw: random.Random) -> Program:
    """A text without a letter."""
    letter = draw.choice("abcde")
    return Program(f"a text without its letters {letter}", lambda x: x.replace(letter, ""), words)


def lengths(draw: random.Random) -> Program:
    """A list of the words of a text."""
    least = draw.randrange(1, 5)
    return Program(
        f"the list of the words of a text that have {least} letters or more, in their order",
        lambda x: [word for word in x.split() if len(word) >= least],
        words,
    )


KINDS = (linear, divisible, above, furthest, occurs, without, lengths)
