"""Rewards from what a configuration says: names, import paths of every form, and errors that name the field."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.rewards import Reward, RewardInput, Score, build
from asyncrl.rewards.build import registered
from asyncrl.rewards.parameters import Count
from asyncrl.rewards.reward import checked, close
from tests.rewards.doubles import answer

HERE = __name__


def length(text: str, record: Mapping[str, Any], factor: float = 1.0) -> float:
    return len(text) * factor + record["level"]


async def slow_length(text: str, record: Mapping[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(text) + record["level"]


def quick(text: str, record: Mapping[str, Any]) -> float:
    return 1.0


quick.inline = quick.pure = True  # type: ignore[attr-defined]


class Constant:
    inline = pure = True

    def __init__(self, value: float, *, times: Count = 1) -> None:
        if value < 0:
            raise ConfigError("value", value, "Must not be below 0.")
        self.value, self.closed = value * times, False

    def __call__(self, answer: RewardInput) -> Score:
        return Score(self.value)

    async def close(self) -> None:
        self.closed = True


def factory(*, value: float = 3.0) -> Reward:
    return Constant(value)


def no_reward() -> str:
    return "no reward"


def three(text: str, record: Mapping[str, Any], more: int) -> float:
    return 0.0


ready = Constant(5.0)
A_NUMBER = 7


@pytest.mark.parametrize(
    ("use", "params", "score"),
    [
        ("length", {}, 4.0),
        ("length", {"factor": 2.0}, 6.0),
        ("Constant", {"value": 2.0, "times": 2}, Score(4.0)),
        ("factory", {}, Score(3.0)),
        ("factory", {"value": 1.0}, Score(1.0)),
        ("ready", {}, Score(5.0)),
    ],
)
def test_import_path_may_lead_to_any_form_of_reward(use: str, params: dict[str, Any], score: Any) -> None:
    assert build(f"{HERE}:{use}", params)(answer("ab", level=2)) == score


def test_async_function_is_awaited_in_the_event_loop() -> None:
    reward = build(f"{HERE}:slow_length")
    assert reward.inline
    result = reward(answer("ab", level=2))
    assert inspect.isawaitable(result)
    assert asyncio.run(asyncio.wait_for(result, 60)) == 4.0


def test_function_is_neither_inline_nor_pure_unless_it_says_so() -> None:
    plain, said = build(f"{HERE}:length"), build(f"{HERE}:quick")
    assert (plain.inline, plain.pure, said.inline, said.pure) == (False, False, True, True)


def test_record_is_the_question_without_its_messages() -> None:
    of_a_file = answer("ab", level=2)
    other = RewardInput("ab", ["ab"], {"level": 7}, of_a_file.trajectory)
    assert of_a_file.record == {"level": 2}
    assert build(f"{HERE}:length")(other) == 9.0


@pytest.mark.parametrize(
    ("use", "params", "field", "value", "remedy"),
    [
        ("nearly", {}, "use", "nearly", r"Must be one of \[.*'contains', 'exact', "),
        ("no_such_module:f", {}, "use", "no_such_module:f", "Must be an import path"),
        (f"{HERE}:missing", {}, "use", f"{HERE}:missing", "Must be an import path"),
        (f"{HERE}:A_NUMBER", {}, "use", f"{HERE}:A_NUMBER", "it is a int"),
        (f"{HERE}:no_reward", {}, "use", f"{HERE}:no_reward", "callable with an answer"),
        (f"{HERE}:three", {}, "use", f"{HERE}:three", "takes 3 positional"),
        (f"{HERE}:ready", {"value": 1.0}, "params", {"value": 1.0}, "already a reward"),
        (f"{HERE}:length", {"fctor": 2.0}, "params.fctor", 2.0, r"Unknown parameter: the function takes \['factor'\]"),
        (f"{HERE}:length", {"factor": "2"}, "params.factor", "2", "valid number"),
        (f"{HERE}:length", {"text": "x"}, "params.text", "x", "Unknown"),
        (f"{HERE}:Constant", {}, "params.value", None, "It must be given"),
        (f"{HERE}:Constant", {"value": 1.0, "times": 0}, "params.times", 0, "greater than or equal to 1"),
        (f"{HERE}:Constant", {"value": -1.0}, "params.value", -1.0, "Must not be below 0"),
        (f"{HERE}:factory", {"worth": 1.0}, "params.worth", 1.0, r"Unknown parameter: the function takes \['value'\]"),
        ("exact", {"key": "a"}, "params.key", "a", r"Unknown parameter: the function takes \['answer_key'\]"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(
    use: str, params: dict[str, Any], field: str, value: object, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        build(use, params, "tasks.sums.reward")
    assert (caught.value.field, caught.value.value) == (f"tasks.sums.reward.{field}", value)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import sys; sys.exit('no licence')", "The import of {module} raised SystemExit: no licence"),
        ("1 / 0", "The import of {module} raised ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all", "The import of {module} raised ModuleNotFoundError: No module named 'no_such"),
        ("import os; os.no_such_name", "The import of {module} raised AttributeError"),
        ("other = 1", "Must be an import path, module:name. {module} has no reward."),
        ("def reward(", "The import of {module} raised SyntaxError"),
        ("class reward:\n  def __init__(self): raise KeyError('x')", "Creating it with {{}} raised KeyError: 'x'"),
        ("class reward:\n  def __init__(self): raise SystemExit(3)", "Creating it with {{}} raised SystemExit: 3"),
    ],
)
def test_module_that_raises_or_exits_is_refused_in_words(
    source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"reward_{secrets.token_hex(4)}"
    (tmp_path / f"{module}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(f"{module}:reward")
    assert caught.value.field == "reward.use"
    assert told.format(module=module) in caught.value.remedy


def test_missing_module_is_told_with_the_searched_places() -> None:
    with pytest.raises(ConfigError) as caught:
        build("no_such_module_at_all:reward")
    assert f"'no_such_module_at_all': it must lie in {Path.cwd()}, from which the run starts" in caught.value.remedy


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_registered_name_leads_to_a_documented_class(name: str) -> None:
    module, _, attribute = registered()[name].partition(":")
    found = getattr(__import__(module, fromlist=[attribute]), attribute)
    assert inspect.isclass(found)
    assert found.__doc__


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), Score(1.0, turns=[0.0, float("nan")]), Score(1.0, turns=[1.0])]
)
def test_unusable_score_is_a_fault_and_no_score(value: Any) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        checked(value, answer("a", "b"))
    assert caught.value.reason == "reward_error"


def test_score_of_each_turn_passes_and_a_number_becomes_one() -> None:
    assert checked(Score(1.0, turns=[0.0, 2.0]), answer("a", "b")).turns == [0.0, 2.0]
    assert checked(True, answer("a")) == Score(1.0)


def test_answer_as_it_stood_after_a_turn() -> None:
    whole = answer("a", "b", "c", answer="x")
    first = whole.until(1)
    assert (first.text, first.texts) == ("b", ("a", "b"))
    assert first.trajectory.turns == whole.trajectory.turns[:2]
    assert first.question == whole.question


def test_closing_is_for_those_who_have_something_open() -> None:
    reward = Constant(1.0)
    asyncio.run(close(reward))
    asyncio.run(close(build("exact")))
    assert reward.closed
