"""Tasks: where questions come from and how answers are scored.

A task is two methods; `build` picks the class that a configuration names, `build_all` does so for a whole run.
Questions are numbered, so a run's order of prompts is a function of its seed and can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from asyncrl import lookup
from asyncrl.config import Config
from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError, EpisodeFailed, raised_by
from asyncrl.schema import Message
from asyncrl.tasks.custom import custom_task
from asyncrl.user_code import load

Question = dict[str, Any]


def ask(task: Task, index: int, field: str) -> Question:
    """Return question `index` of the task that this setting configures. Raises ConfigError if the task raises."""
    try:
        with raised_by("question"):
            return task.question(index)
    except EpisodeFailed as failed:
        raise ConfigError(field, index, f"question({index}) of the task raised {failed.located}.") from failed


class Task(Protocol):
    """Endless or finite supply of numbered questions, with a score for their answers. A class that inherits from it has
    the defaults below."""

    def question(self, index: int) -> Question:
        """Return question `index`: a record with "messages" (a chat) and whatever `score` needs. The same index always
        gives the same question."""
        ...

    def score(self, answer: str, question: Question) -> float:
        """Return the reward of an answer's text. Raises EpisodeFailed when the judge, not the answer, is at fault."""
        raise TypeError("the task has no scores: task.reward names a reward, or its environment rewards episodes")

    @property
    def inline(self) -> bool:
        """True if `score` is quick and cannot hang; otherwise it runs in a thread, with timeout
        rollout.reward_timeout."""
        return True

    def correct(self, reward: float) -> bool:
        """Return whether a reward means a correct answer, for accuracy."""
        return reward >= 1.0

    @property
    def size(self) -> int | None:
        """Number of questions, or None for an endless task."""
        return None


KINDS = {
    "copy": "asyncrl.tasks.copy_digits:CopyDigits",
    "file": "asyncrl.tasks.files:FileTask",
}
"""Task classes by task.kind, beside those of extensions; each is created with the task's configuration."""


def build(config: TaskConfig) -> Task:
    """Build the task that a configuration names, as extensions wrap it: with its images and its tools."""
    task = _plain(config)
    for field in ("image_key", "tools"):
        if getattr(config, field):
            task = lookup.wrapped(task, config, field)
    return task


def _plain(config: TaskConfig) -> Task:
    kinds = KINDS | lookup.offered("tasks")
    if config.kind in kinds:
        task: Task = load(kinds[config.kind], "task.kind")(config)
        return task
    if ":" in config.kind:
        return custom_task(config.kind, config.params)
    raise ConfigError("task.kind", config.kind, f"Must be one of {sorted(kinds)}, or an import path, module:name.")


def build_all(config: Config) -> dict[str, Task]:
    """Build every task and evaluation set of a run, by name. A ConfigError names the field of the set that it is
    about."""
    built = {}
    for name, section in (config.mixture | config.eval_sets).items():
        try:
            built[name] = build(section)
        except ConfigError as error:
            field = error.field.replace("task.", f"{config.field_of(name)}.")
            raise ConfigError(field, error.value, error.remedy) from None
    return built


def head(system: str | None, shots: Iterable[tuple[str, str]] = ()) -> list[Message]:
    """Return the system message, if there is one, and the worked examples (question, answer)."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for question, answer in shots:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found
