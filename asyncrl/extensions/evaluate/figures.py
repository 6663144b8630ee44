"""Figures of an evaluation, with their uncertainty, and which of two is better.

A question is what varies: answers to one question are not independent of each other. So intervals come from a bootstrap
over questions, which resamples them with all of their answers (Efron and Tibshirani 1993, chapter 13: percentiles), and
two models are compared by the differences at the questions that both were asked (paired).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

import numpy as np

from asyncrl.errors import RecordError
from asyncrl.extensions.evaluate.extension import RESULTS
from asyncrl.extensions.mathematics.forms import last_boxed, normalised
from asyncrl.jsonl import read_object
from asyncrl.rewards.matching import last_number
from asyncrl.rollout.evaluation import pass_at

Record = Mapping[str, Any]
"""What answers.jsonl says of one question (program.py)."""
RESAMPLED, SEED, LEVEL = 4000, 0, 0.95
"""Number of resampled sets of questions, their seed, and the probability of an interval."""
WHOLE = ("mean", "accuracy")
"""Figures that decide which of two is better: the first that both have."""


@dataclass(frozen=True)
class Figure:
    """A mean over questions with its interval."""

    value: float
    low: float
    high: float
    questions: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] of {self.questions}"


@dataclass(frozen=True)
class Difference(Figure):
    """The second model minus the first, at the questions that both were asked."""

    first: float
    second: float

    @property
    def verdict(self) -> str:
        """Which is better, if the interval of the difference excludes 0."""
        if self.low > 0 or self.high < 0:
            return "B is better" if self.low > 0 else "A is better"
        return "no difference shown"

    def __str__(self) -> str:
        told = f"{self.first:.4g} -> {self.second:.4g}, {self.value:+.4g}"
        return f"{told} [{self.low:+.4g}, {self.high:+.4g}] of {self.questions}: {self.verdict}"


def values(question: Record) -> dict[str, float]:
    """Return the figures of one question. Failed attempts are left out, and what has no answer has no figure.

    accuracy, reward            of the greedy answer
    mean, reward/mean           over the samples (avg@n)
    pass@k                      the unbiased estimate for k = 1, 2, 4, ... and for all samples
    majority@n                  whether the most frequent final answer is right; the mean over several such
    """
    found: dict[str, float] = {}
    if "reward" in (greedy := question["greedy"]):
        found |= {"accuracy": float(greedy["correct"]), "reward": float(greedy["reward"])}
    samples = [one for one in question["samples"] if "reward" in one]
    if not samples:
        return found
    right, count = sum(one["correct"] for one in samples), len(samples)
    found |= {"mean": right / count, "reward/mean": fmean(one["reward"] for one in samples)}
    for k in sorted({count, *(2**power for power in range(count.bit_length()))}):
        found[f"pass@{k}"] = pass_at(k, right, count)
    return {**found, f"majority@{count}": majority(samples)}


def majority(samples: Sequence[Record]) -> float:
    """Return the probability that the most frequent final answer is right, if ties are broken at random."""
    votes = defaultdict[str, list[bool]](list)
    for one in samples:
        votes[one["answer"]].append(one["correct"])
    most = max(map(len, votes.values()))
    return fmean(fmean(one) for one in votes.values() if len(one) == most)


def final_answer(text: str) -> str:
    r"""Return what votes are counted by: the content of the last box or <answer>, else the last number of the last
    line, else that line in lower case without punctuation."""
    if (inside := last_boxed(text)) is not None:
        return "".join(inside.split())
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return " ".join(tagged[-1].split())
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    number = last_number(last)
    return normalised(last) if number is None else f"{number:.12g}"


def figures(questions: Sequence[Record]) -> dict[str, Figure]:
    """Return the figures of a set: means over the questions that have them. The same questions give the same
    intervals."""
    columns = defaultdict[str, list[float]](list)
    for question in questions:
        for name, value in values(question).items():
            columns[name].append(value)
    return {name: Figure(fmean(column), *interval(column), len(column)) for name, column in columns.items()}


def interval(column: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the mean of these values, by the bootstrap."""
    drawn, array = np.random.default_rng(SEED), np.asarray(column, dtype=np.float64)
    means = [array[drawn.integers(0, len(array), len(array))].mean() for _ in range(RESAMPLED)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def differences(first: Sequence[Record], second: Sequence[Record]) -> dict[str, Difference]:
    """Return the differences of all figures that some question has in both evaluations, of the same set."""
    known = {question["question"]: values(question) for question in first}
    pairs = defaultdict[str, list[tuple[float, float]]](list)
    for question in second:
        before = known.get(question["question"], {})
        for name, value in values(question).items():
            if name in before:
                pairs[name].append((before[name], value))
    found = {}
    for name, both in pairs.items():
        mine, other = (fmean(column) for column in zip(*both, strict=True))
        low, high = interval([after - before for before, after in both])
        found[name] = Difference(other - mine, low, high, len(both), mine, other)
    return found


def compared(first: Path, second: Path, *, as_json: bool) -> Iterator[str]:
    """Yield what differs in the settings and the figures of each set, and which of the two is better on it. Raises
    RecordError if one is no evaluation, or if they share no question."""
    results = [_read(folder) for folder in (first, second)]
    before, now = (one["settings"] for one in results)
    if not as_json:
        yield f"A  {first}"
        yield f"B  {second}"
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                texts = (shorten(json.dumps(one.get(name)), 80, placeholder=" ...") for one in (before, now))
                yield f"other {name}: {' -> '.join(texts)}"
    shared = [name for name in results[0]["sets"] if name in results[1]["sets"]]
    found = {name: differences(*(one["sets"][name]["questions"] for one in results)) for name in shared}
    found = {name: figures for name, figures in found.items() if figures}
    if not found:
        raise RecordError(f"{first} and {second} have no question in common: evaluate both on the same eval.sets")
    for name, figures in found.items():
        counts = [len(one["sets"][name]["questions"]) for one in results]
        if as_json:
            told = {figure: {**vars(one), "verdict": one.verdict} for figure, one in figures.items()}
            yield json.dumps({"set": name, "questions": counts, "figures": told})
            continue
        yield f"{name}: {counts[0]} and {counts[1]} questions"
        for figure, one in figures.items():
            yield f"  {figure:<12} {one}"
        decides = next(figure for figure in (*WHOLE, *figures) if figure in figures)
        yield f"  => {figures[decides].verdict} ({decides}, {figures[decides].questions} shared questions)"


def _read(folder: Path) -> dict[str, Any]:
    file = folder / RESULTS if folder.is_dir() else folder
    found = read_object(file)
    if not found or not {"settings", "sets"} <= found.keys():
        raise RecordError(f"{file} has no results of an evaluation: run asyncrl-train mode=evaluate to its end")
    return found
