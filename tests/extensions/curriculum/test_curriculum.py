"""Tasks are weighed with a function of the progress on them, in an order that the seed fixes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.template import ChatTemplate
from asyncrl.errors import ConfigError, RecordError
from asyncrl.extensions.curriculum import progress as module
from asyncrl.extensions.curriculum.progress import (
    WINDOW,
    Curriculum,
    CurriculumInput,
    CurriculumMixture,
    TaskProgress,
    towards_half_solved,
)
from asyncrl.lookup import active
from asyncrl.models.catalog import resolve
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.rollout.prompts import Prompts
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.tasks.build import build_all
from tests.fakes import LengthTask, addresses, group, tiny_config, tiny_values

NAMES = ("sort", "sum", "copy")
EQUAL = dict.fromkeys(NAMES, 1.0)


def of_three(**changes: Any) -> Any:
    task = tiny_values()["task"]
    return tiny_config(tasks={name: {**task, "name": name} for name in NAMES}, **changes)


def mixture(monkeypatch: pytest.MonkeyPatch, curriculum: Curriculum) -> CurriculumMixture:
    """The hooks of a run with three tasks and this curriculum."""
    monkeypatch.setattr(module, "here", curriculum, raising=False)
    config = of_three(**{"curriculum.function": f"{module.__name__}:here"})
    hooks = active(config)["curriculum"].rollout()
    assert isinstance(hooks, CurriculumMixture)
    hooks.start(RolloutRun(config, addresses(), Path(), print, dict.fromkeys(NAMES, LengthTask())))
    return hooks


def test_without_a_function_weights_stay_and_nothing_is_kept() -> None:
    hooks = active(of_three())["curriculum"].rollout()
    assert hooks.mixture(EQUAL, 3) is EQUAL
    assert hooks.state() is None


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"sort": 1.0, "sums": 1.0}, r"got 'sums'. There is no such task; choose among \['copy', 'sort', 'sum'\]"),
        ({"sort": 1.0, "sum": -0.5}, "Weights must be finite and not negative"),
        ({"sort": 0.0}, "at least one must be above 0"),
        ({}, "at least one must be above 0"),
        ({"sort": float("nan"), "sum": 1.0}, "finite"),
        ({"sort": float("inf"), "sum": 1.0}, "finite"),
        ({"sort": 1e308, "sum": 1e308}, "finite"),
        ({"sort": "1", "sum": 1.0}, "must be finite"),
        (None, "Must return a mapping of task names to weights"),
    ],
)
def test_impossible_weights_name_the_setting_and_what_was_given(
    monkeypatch: pytest.MonkeyPatch, weights: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        mixture(monkeypatch, lambda told: weights).mixture(EQUAL, 0)
    assert caught.value.field == "curriculum.function"


def test_progress_tells_version_weight_and_recent_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CurriculumInput] = []

    def spy(told: CurriculumInput) -> dict[str, float]:
        asked.append(told)
        return {"sort": 1.0}

    hooks, weights = mixture(monkeypatch, spy), {**EQUAL, "sum": 3.0}
    hooks.group(group(task="sum", rewards=[0.0, 0.0, 2.0, 0.0]))  # a reward above 0 is a right answer here
    hooks.group(group(task="sum", rewards=[1.0, 1.0]))
    assert hooks.mixture(weights, 5) == {"sort": 1.0}
    expected = {
        "sort": TaskProgress(1.0, 0, None, None, None),
        "sum": TaskProgress(3.0, 2, 0.75, 0.625, 2.0),
        "copy": TaskProgress(1.0, 0, None, None, None),
    }
    assert asked[-1] == CurriculumInput(5, expected)

    resumed = mixture(monkeypatch, spy)
    resumed.restore(hooks.state())
    resumed.mixture(weights, 5)
    assert asked[-1] == CurriculumInput(5, expected)

    for _ in range(WINDOW):
        hooks.group(group(task="sum", rewards=[0.0, 0.0]))
    hooks.mixture(weights, 6)
    assert asked[-1].tasks["sum"] == TaskProgress(3.0, WINDOW + 2, 0.0, 0.0, 2.0)


def test_damaged_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="state of the curriculum is damaged"):
        mixture(monkeypatch, towards_half_solved).restore(b"\x93")


def progress(**solved: float | None) -> CurriculumInput:
    return CurriculumInput(0, {name: TaskProgress(2.0, 9, share, share, 100.0) for name, share in solved.items()})


def test_half_solved_tasks_are_preferred_and_none_is_given_up() -> None:
    weights = towards_half_solved(progress(half=0.5, hard=0.1, easy=0.9, hopeless=0.0, done=1.0, new=None))
    assert weights == pytest.approx({"half": 2.0, "hard": 0.72, "easy": 0.72, "hopeless": 0.2, "done": 0.2, "new": 2.0})


def test_mixture_follows_what_the_model_can_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, config = mixture(monkeypatch, towards_half_solved), of_three()
    for name, right in (("sort", 0), ("sum", 4), ("copy", 8)):
        for _ in range(WINDOW):
            hooks.group(group(task=name, rewards=[1.0] * right + [0.0] * (8 - right)))
    prompts = Prompts(config, build_all(config), ChatTemplate(load_tokenizer(resolve("builtin:tiny"), None)), 64)
    shares = Counter(prompts.draw(hooks.mixture(EQUAL, 0)).task for _ in range(1200))
    assert [shares[name] / 100 for name in NAMES] == pytest.approx([1, 10, 1], rel=0.3)
