"""Generated problems: endless, the same for the same number, and rewarded with 0 or 1."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl import tasks
from asyncrl.errors import ConfigError
from asyncrl.extensions.datasets.reasoning_gym import BLOCK, LISTING
from asyncrl.rollout.held_out import EVAL_OFFSET
from asyncrl.tasks.build import build, build_all
from tests.fakes import tiny_config


def gym(**changes: Any) -> tasks.Task:
    settings = {"kind": "reasoning_gym", "name": "chain_sum", "system": "Short.", "shots": 1}
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    given = {**settings, "params": params} | changes
    return build(tiny_config(**{f"task.{name}": value for name, value in given.items()}).task)


def test_generator_question_follows_system_message_and_examples() -> None:
    task = gym()
    question = task.question(3)
    assert [m["role"] for m in question["messages"]] == ["system", "user", "assistant", "user"]
    assert question["messages"][-1]["content"] == question["question"]
    assert question == gym().question(3)
    assert question["messages"][-1] != task.question(4)["messages"][-1]


def test_endless_generators_questions_follow_its_seed() -> None:
    import reasoning_gym

    task = gym(params={})
    assert task.size is None
    for index in (0, 7, EVAL_OFFSET + 3):
        direct = reasoning_gym.create_dataset("chain_sum", size=2**31 - 1, seed=1)
        assert task.question(index)["question"] == direct[index]["question"]


@pytest.mark.parametrize("name", LISTING)
def test_listing_generator_has_no_end_either(name: str) -> None:
    """Made for 2**31 questions gsm_symbolic takes all memory of the machine."""
    task = gym(name=name, params={}, shots=0)
    places = (0, 1, BLOCK - 1, BLOCK, EVAL_OFFSET, EVAL_OFFSET + BLOCK + 1)
    asked = [task.question(index)["messages"][-1]["content"] for index in places]
    assert len(set(asked)) > 1
    again = gym(name=name, params={}, shots=0)
    assert [again.question(index)["messages"][-1]["content"] for index in reversed(places)] == asked[::-1]


def test_generator_rewards_are_0_or_1() -> None:
    task = gym()
    question = task.question(0)
    right = str(question["answer"])
    assert task.score(f" {right}\n", question) == 1.0
    for wrong in ("", "   ", f"{right}0", f"The answer is {right}", "nonsense"):
        assert task.score(wrong, question) == 0.0
    assert task.correct(1.0)
    assert not task.correct(0.0)


@pytest.mark.parametrize("changes", [{"name": "no_such_generator"}, {"params": {"no_such": 1}}])
def test_what_reasoning_gym_refuses_names_the_setting(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reasoning-gym rejects it") as caught:
        gym(**changes)
    assert caught.value.field == "task.name / task.params"


def test_a_generator_of_several_tasks_is_named_by_its_field() -> None:
    task = tiny_config().task.model_dump()
    with pytest.raises(ConfigError) as caught:
        build_all(tiny_config(tasks={"gym": {**task, "kind": "reasoning_gym"}}))
    assert caught.value.field == "tasks.gym.name / tasks.gym.params"
