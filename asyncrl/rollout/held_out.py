"""Questions that are held out for evaluation, or are too long, which are found before the first prompt of the
training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.schema import Identity, Prompt
from asyncrl.tasks import Task

EVAL_OFFSET = 1 << 30  # first index of the evaluation questions of an endless task
MAX_SKIPS = 10_000  # training questions in a row that turn out to be evaluation questions, or too long


def training_range(name: str, task: Task, overlong: Collection[int], count: int) -> tuple[int, int]:
    """Return the range [first, last) of question indices that training draws from, when `count` questions are held
    out."""
    if task.size is None:
        return 0, EVAL_OFFSET
    fitting = [index for index in range(task.size) if index not in overlong]
    first = getattr(task, "held_out", 0) or (*fitting, task.size)[min(count, len(fitting))]
    if first >= task.size:
        raise ConfigError(
            "eval.questions",
            count,
            f"Task {name} has {task.size} questions, so that none would be left for training: lower it.",
        )
    return first, task.size


def overlong_questions(
    name: str, task: Task, length: Callable[[int], int], *, longest: int, refuses: bool, tell: Callable[[str], None]
) -> Collection[int]:
    """Return the indices of overlong questions of a finite task; `length` returns how many tokens one has. Raises
    ConfigError if overlong questions are refused, or if no others are left."""
    overlong = {index: tokens for index in range(task.size or 0) if (tokens := length(index)) > longest}
    if overlong:
        text = (
            f"{len(overlong)} of the {task.size} questions of {name} are longer than the {longest} tokens that "
            f"rollout.max_new_tokens leaves for a prompt; the longest has {max(overlong.values())}, the first is "
            f"number {min(overlong)}"
        )
        if refuses or len(overlong) == task.size:
            raise ConfigError("rollout.overlong_prompts", "refuse" if refuses else "skip", f"{text}.")
        tell(f"{text}: they are skipped (rollout.overlong_prompts)")
    return overlong.keys()


def draw_held_out(
    render: Callable[[int], Prompt | None],
    name: str,
    task: Task,
    count: int,
    *,
    first: int | None,
    longest: int,
    serial: Iterator[int],
) -> list[Prompt]:
    """Return `count` distinct evaluation prompts of at most `longest` tokens; for a task that is also trained, from
    below its `first` training question. `render` returns the prompt of a question, or None if it is left out."""
    files = getattr(task, "held_out", 0)  # rows of an evaluation file
    offset, limit = (EVAL_OFFSET, MAX_SKIPS) if task.size is None else (0, files or first or task.size)
    prompts: dict[Identity, Prompt] = {}
    for index in range(offset, offset + limit):
        if len(prompts) == count:
            break
        if (prompt := render(index)) is not None and prompt.identity not in prompts:
            prompts[prompt.identity] = msgspec.structs.replace(prompt, uid=f"e{next(serial):08d}")
    whole = bool(task.size) and (files or first is None)  # its own file: use all of its questions
    if len(prompts) < count and not whole:
        raise ConfigError(
            "eval.questions",
            count,
            f"Task {name} has only {len(prompts)} distinct questions of up to {longest} tokens, which is what "
            "rollout.max_new_tokens leaves for a prompt: lower either of them.",
        )
    return list(prompts.values())
