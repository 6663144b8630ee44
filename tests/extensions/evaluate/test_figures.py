"""Figures of evaluations against closed forms, and intervals against what they promise."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import RecordError
from asyncrl.extensions.evaluate.figures import (
    compared,
    differences,
    figures,
    final_answer,
    interval,
    majority,
    values,
)


def answer(correct: bool, text: str = "", reward: float | None = None) -> dict[str, Any]:
    return {"correct": correct, "reward": float(correct) if reward is None else reward, "answer": text}


def question(name: str, greedy: bool, samples: list[bool]) -> dict[str, Any]:
    return {"question": name, "greedy": answer(greedy), "samples": [answer(one, str(one)) for one in samples]}


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    verdicts = [True, False, True, False, False, False]
    found = values(question("q", True, verdicts))
    for k in (1, 2, 4, 6):
        drawn = list(itertools.combinations(verdicts, k))
        assert found[f"pass@{k}"] == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-15)
    assert found["mean"] == found["pass@1"] == pytest.approx(2 / 6)
    assert sorted(name for name in found if name.startswith("pass@")) == ["pass@1", "pass@2", "pass@4", "pass@6"]


def test_failed_attempts_are_left_out_of_figures() -> None:
    one = {"question": "q", "greedy": {"failed": "lost"}, "samples": [{"failed": "lost"}, answer(True), answer(False)]}
    assert values(one) == {
        "mean": 0.5,
        "reward/mean": 0.5,
        "pass@1": 0.5,
        "pass@2": 1.0,
        "majority@2": 0.5,
    }
    assert values({"question": "q", "greedy": {"failed": "lost"}, "samples": []}) == {}


def test_majority_breaks_ties_in_expectation() -> None:
    assert majority([answer(True, "4"), answer(False, "5"), answer(True, "4")]) == 1.0
    assert majority([answer(True, "4"), answer(False, "5"), answer(False, "5")]) == 0.0
    assert majority([answer(True, "4"), answer(False, "5"), answer(False, "6")]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"so \boxed{ \frac12 }", r"thus we get \boxed{\frac12}."),
        ("<answer> apple, bat </answer>", "x\n<answer>apple,  bat</answer>"),
        ("It is 1,200.", "I think\nthe answer is 1200"),
        ("The Cat.\n", "reasons\ncat"),
    ],
)
def test_votes_for_the_same_final_answer_count_together(one: str, other: str) -> None:
    assert final_answer(one) == final_answer(other) != ""


def test_interval_of_a_mean_is_that_of_the_normal_law() -> None:
    column = np.random.default_rng(1).normal(2.0, 3.0, 400)
    low, high = interval(column.tolist())
    half = 1.96 * column.std() / math.sqrt(len(column))
    assert (low, high) == pytest.approx((column.mean() - half, column.mean() + half), abs=0.1 * half)
    assert interval(column.tolist()) == (low, high)  # the same questions, the same interval


def binomial_quantile(count: int, share: float, level: float) -> int:
    """Return the smallest number whose cumulative probability is at least `level`."""
    terms = (math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1))
    return next(k for k, below in enumerate(itertools.accumulate(terms)) if below >= level)


@pytest.mark.parametrize(("right", "count"), [(15, 50), (120, 400), (0, 10), (10, 10)])
def test_interval_of_verdicts_is_that_of_the_binomial_law(right: int, count: int) -> None:
    """A resampled set of verdicts has a binomial number of right ones. Of 4000 sets, some are one answer off."""
    low, high = interval([1.0] * right + [0.0] * (count - right))
    expected = [binomial_quantile(count, right / count, level) / count for level in (0.025, 0.975)]
    assert [low, high] == pytest.approx(expected, abs=1.001 / count)


def test_interval_of_a_difference_is_that_of_differing_ones() -> None:
    """Six of a hundred pairs differ, all in one direction: the sum of the differences is binomial."""
    first = [question(str(number), number < 50, []) for number in range(100)]
    second = [question(str(number), number < 56, []) for number in reversed(range(100))]
    found = differences(first, second)["accuracy"]
    expected = [binomial_quantile(100, 0.06, level) / 100 for level in (0.025, 0.975)]
    assert [found.low, found.high] == pytest.approx(expected, abs=0.0101)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    drawn = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        low, high = interval((drawn.random(100) < 0.3).astype(float).tolist())
        held += low <= 0.3 <= high
    assert 51 <= held <= 60  # 57 in expectation; fewer than 51 with a probability of 0.2 %


def test_intervals_resample_questions_and_not_answers() -> None:
    """Answers to one question are alike: many of them make no interval narrower."""
    alike = [question(str(number), number % 2 == 0, [number % 2 == 0] * 64) for number in range(20)]
    found = figures(alike)
    assert found["mean"].high - found["mean"].low == found["accuracy"].high - found["accuracy"].low > 0.3


def test_pairing_finds_a_difference_that_unpaired_intervals_hide() -> None:
    """Half of the questions are hard; the second model is right on four more of them."""
    first = [question(str(number), number < 50, []) for number in range(100)]
    second = [question(str(number), number < 56, []) for number in range(100)]
    one, two = figures(first)["accuracy"], figures(second)["accuracy"]
    assert one.high > two.low
    difference = differences(first, second)["accuracy"]
    assert (difference.first, difference.second, difference.questions) == (0.5, 0.56, 100)
    assert difference.verdict == "B is better"
    assert differences(second, first)["accuracy"].verdict == "A is better"


def test_equal_models_differ_as_rarely_as_promised() -> None:
    drawn = np.random.default_rng(3)
    verdicts = []
    for _ in range(40):
        both = [
            [question(str(number), bool(right), []) for number, right in enumerate(drawn.random(80) < 0.5)]
            for _ in range(2)
        ]
        verdicts.append(differences(*both)["accuracy"].verdict)
    assert verdicts.count("no difference shown") >= 34  # 38 in expectation


def results(folder: Path, questions: list[dict[str, Any]], name: str = "sums") -> Path:
    folder.mkdir()
    content = {"settings": {"model": {"path": folder.name}}, "sets": {name: {"questions": questions}}}
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_command_compares_the_questions_that_both_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = pytest.importorskip("asyncrl.extensions.view.inspection.cli").main
    a = results(tmp_path / "a", [question(str(number), False, [False, True]) for number in range(30)])
    b = results(tmp_path / "b", [question(str(number), True, [True, True]) for number in range(10, 50)])
    assert main([str(a), str(b), "--compare"]) == 0
    told = capsys.readouterr().out
    assert "sums: 30 and 40 questions" in told
    assert 'other model: {"path": "a"} -> {"path": "b"}' in told
    assert "=> B is better (mean, 20 shared questions)" in told
    assert main([str(a), str(b), "--compare", "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["figures"]["mean"]["second"] == fmean([1.0] * 20)
    assert line["figures"]["mean"]["verdict"] == "B is better"


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = results(tmp_path / "a", [question("1", True, [])])
    other = results(tmp_path / "b", [question("2", True, [])])
    with pytest.raises(RecordError, match=r"no question in common: evaluate both on the same eval\.sets"):
        list(compared(a, other, as_json=False))
    (tmp_path / "run").mkdir()
    with pytest.raises(RecordError, match="no results of an evaluation: run asyncrl-train mode=evaluate"):
        list(compared(a, tmp_path / "run", as_json=False))
    main = pytest.importorskip("asyncrl.extensions.view.inspection.cli").main
    assert main([str(a), str(other)]) == 1
    assert "go together" in capsys.readouterr().err
