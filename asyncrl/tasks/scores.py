"""Rewards of the tasks: the reward that a task's config section names, or the task's own score."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from asyncrl.config import Config
from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.rewards.build import build, registered
from asyncrl.rewards.reward import Reward, RewardInput
from asyncrl.tasks import Task
from asyncrl.user_code import load


class TaskScoreReward:
    """Reward that calls a task's `score`."""

    pure = False

    def __init__(self, task: Task) -> None:
        self._task, self.inline = task, task.inline

    def __call__(self, answer: RewardInput) -> float:
        """Score the last completion."""
        return self._task.score(answer.text, dict(answer.question))


def rewards(config: Config, tasks: Mapping[str, Task]) -> dict[str, Reward]:
    """Return the reward of every task and evaluation set. Raises ConfigError for the field that is wrong."""
    found: dict[str, Reward] = {}
    for name, section in (config.mixture | config.eval_sets).items():
        field = config.field_of(name)
        if section.reward is None and section.has_rows:
            raise ConfigError(
                f"{field}.reward",
                None,
                "A task from a file or dataset has no reward of its own: set one, such as exact.",
            )
        found[name] = TaskScoreReward(tasks[name]) if section.reward is None else _named(section, field)
    return found


def _named(section: TaskConfig, field: str) -> Reward:
    assert section.reward is not None
    params = dict(section.reward_params)
    if section.has_rows and _takes_answer_key(section.reward):
        params = {"answer_key": section.answer_key, **params}
    try:
        return build(section.reward, params, "reward")
    except ConfigError as error:
        place = error.field.replace("reward.params", f"{field}.reward_params").replace("reward.use", f"{field}.reward")
        raise ConfigError(place, error.value, error.remedy) from None


def _takes_answer_key(use: str) -> bool:
    known = registered()
    return use in known and "answer_key" in inspect.signature(load(known[use], "task.reward")).parameters
