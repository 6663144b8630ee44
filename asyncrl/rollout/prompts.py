"""Questions of the tasks, rendered with the model's chat template: a stream of prompts each, and the evaluation sets.

Evaluation questions are drawn first; training skips every question whose rendered text is among those of any set, so
they are disjoint whatever the tasks' generators repeat. Where a question has a "seed" the text alone does not tell it
from another: games open alike.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config
from asyncrl.envs.tools.system import ignores_tools, tools_in_system
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question, Task
from asyncrl.types import Prompt, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVAL_OFFSET = 1 << 30  # endless tasks: evaluation questions are numbered from here
MAX_SKIPS = 10_000  # training questions in a row that turn out to be evaluation questions

Identity = tuple[tuple[int, ...], Any]
"""What no two questions share: the rendered text, and the seed if there is one."""


class Cursor(msgspec.Struct, frozen=True):
    """How far training prompts were drawn."""

    prompts: int  # of all tasks
    questions: dict[str, int]  # by task, with those that were left out


class Prompts:
    """By task, endless training prompts; by evaluation set, its prompts."""

    def __init__(self, config: Config, tasks: Mapping[str, Task], template: Template, model_length: int) -> None:
        self._tasks, self._template = tasks, template
        self._questions, self._seed = config.eval.questions, config.run.seed
        self._longest = model_length - config.rollout.max_new_tokens
        self._serial = 0
        self._drawn: Counter[str] = Counter()
        self._skip: Mapping[str, int] = {}
        ranges = {name: self._training_range(name) for name in config.mixture}
        serial = itertools.count()
        self.held_out = {
            name: self._draw_held_out(name, ranges[name][0] if name in ranges else None, serial)
            for name in config.eval_sets
        }
        taken = {_identity(one.token_ids, one.question) for prompts in self.held_out.values() for one in prompts}
        self.training = {name: self._training(name, *ranges[name], taken) for name in config.mixture}

    def cursor(self) -> Cursor:
        """Where the next prompts come from."""
        return Cursor(self._serial, dict(self._drawn))

    def go_on(self, cursor: Cursor) -> None:
        """As the prompts that were drawn so far are those up to the cursor; before the first is drawn."""
        self._serial, self._skip = cursor.prompts, cursor.questions
        self._drawn = Counter(cursor.questions)

    def again(self, uid: str, task: str, index: int) -> Prompt:
        """A training prompt that was drawn before. Raises ConfigError when there is no such question any more."""
        size = self._tasks[task].size if task in self._tasks else 0
        if size is not None and index >= size:
            remedy = (
                f"The checkpoint plays question {index} of task {task}: resume with the tasks that it was made with."
            )
            raise ConfigError("resume", task, remedy)
        token_ids, question = self._render(task, index)
        return Prompt(uid, token_ids, question, task, index)

    def _training_range(self, name: str) -> tuple[int, int]:
        """Indices [first, last) that training draws from."""
        task = self._tasks[name]
        if task.size is None:
            return 0, EVAL_OFFSET
        first = getattr(task, "held_out", 0) or self._questions
        if first >= task.size:
            raise ConfigError(
                "eval.questions",
                self._questions,
                f"Task {name} has {task.size} questions; none would be left to train on.",
            )
        return first, task.size

    def _draw_held_out(self, name: str, first: int | None, serial: Iterator[int]) -> list[Prompt]:
        """Distinct evaluation prompts; of a task that is trained, from below its `first` training question."""
        task = self._tasks[name]
        files = getattr(task, "held_out", 0)  # rows of an evaluation file
        offset, limit = (EVAL_OFFSET, MAX_SKIPS) if task.size is None else (0, files or first or task.size)
        prompts: dict[Identity, Prompt] = {}
        for index in range(offset, offset + limit):
            if len(prompts) == self._questions:
                break
            token_ids, question = self._render(name, index)
            if (identity := _identity(token_ids, question)) not in prompts:
                prompts[identity] = Prompt(f"e{next(serial):08d}", token_ids, question, name)
        whole = bool(task.size) and (files or first is None)  # a file of its own: all that it has
        if len(prompts) < self._questions and not whole:
            raise ConfigError(
                "eval.questions",
                self._questions,
                f"Task {name} has only {len(prompts)} distinct questions to hold out.",
            )
        return list(prompts.values())

    def _training(self, name: str, first: int, last: int, held_out: set[Identity]) -> Iterator[Prompt]:
        """Questions in an order that the seed fixes, whatever the other tasks; a finite task is reshuffled every epoch.
        Uids count the prompts of all tasks."""
        skipped = 0
        for index in itertools.islice(self._indices(name, first, last), self._skip.get(name, 0), None):
            self._drawn[name] += 1
            token_ids, question = self._render(name, index)
            if _identity(token_ids, question) in held_out:
                skipped += 1
                if skipped == MAX_SKIPS:
                    raise ConfigError(
                        "eval.questions",
                        self._questions,
                        f"{MAX_SKIPS} training questions of {name} in a row are evaluation questions: it is too small.",
                    )
                continue
            skipped = 0
            self._serial += 1
            yield Prompt(f"p{self._serial - 1:08d}", token_ids, question, name, index)

    def _indices(self, name: str, first: int, last: int) -> Iterator[int]:
        order = random.Random(f"{self._seed} {name}")
        if self._tasks[name].size is None:
            while True:
                yield order.randrange(first, last)
        while True:
            epoch = list(range(first, last))
            order.shuffle(epoch)
            yield from epoch

    def _render(self, name: str, index: int) -> tuple[list[int], Question]:
        question = self._with_tools(self._tasks[name].question(index))
        ids = self._template.begin(question["messages"], question.get("tools", ()))
        if len(ids) > self._longest:
            raise ConfigError(
                "rollout.max_new_tokens",
                len(ids),
                f"Question {index} of {name} is longer than the {self._longest} tokens that the model's length leaves.",
            )
        return ids, question

    def _with_tools(self, question: Question) -> Question:
        """Where the template says nothing of its tools, the system message does."""
        tools = question.get("tools", ())
        if not ignores_tools(self._template, tools):
            return question
        form = question.get("tool_format", "hermes")
        return {**question, "messages": tools_in_system(question["messages"], tools, form)}


def _identity(token_ids: list[int], question: Question) -> Identity:
    return tuple(token_ids), question.get("seed")


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """The model folder's tokenizer, with another chat template if one is given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).expanduser().read_text()
    if tokenizer.chat_template is None:
        raise ConfigError(
            "model.chat_template", None, f"The tokenizer in {model} has no chat template: give a jinja file."
        )
    return tokenizer


def stop_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end an answer: the generation config's and the tokenizer's own."""
    import json

    file = model / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = set(found if isinstance(found, list) else [found]) | {tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)
