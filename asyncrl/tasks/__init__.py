"""Tasks: where questions come from and how answers are scored.

A task is two methods; build.py makes those that a configuration names. Questions are numbered, so a run's order of
prompts is a function of its seed and can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from asyncrl.errors import ConfigError, EpisodeFailed, raised_by
from asyncrl.images import are_messages
from asyncrl.schema import Message

Question = dict[str, Any]


def ask(task: Task, index: int, field: str) -> Question:
    """Return question `index` of the task that this setting configures. Raises ConfigError if there is none."""
    try:
        with raised_by("question"):
            question = task.question(index)
            if isinstance(question, dict) and question.get("messages") and are_messages(question["messages"]):
                return question
            raise TypeError(f"it returned {question!r:.200}, which has no list of messages with role and content")
    except EpisodeFailed as failed:
        raise ConfigError(field, index, f"question({index}) of the task failed: {failed.located}.") from failed


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


def head(system: str | None, shots: Iterable[tuple[str, str]] = ()) -> list[Message]:
    """Return the system message, if there is one, and the worked examples (question, answer)."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for question, answer in shots:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return found
