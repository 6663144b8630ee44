"""The stream of prompts: questions of a task, rendered with the model's chat template.

Evaluation questions are drawn first; training skips every question whose rendered text is among them, so the two
are disjoint whatever the task's generator repeats.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question, Task
from asyncrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVAL_OFFSET = 1 << 30  # endless tasks: evaluation questions are numbered from here
MAX_SKIPS = 10_000  # training questions in a row that turn out to be evaluation questions


class Prompts:
    """Endless training prompts, and the held-out ones."""

    def __init__(self, config: Config, task: Task, tokenizer: PreTrainedTokenizerBase, model_length: int) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._longest = model_length - config.rollout.max_new_tokens
        self._order = random.Random(config.run.seed)
        first, last = self._training_range(config)
        self.held_out = self._draw_held_out(config)
        taken = {tuple(prompt.token_ids) for prompt in self.held_out}
        self.training = self._training(first, last, taken)

    def decode(self, token_ids: list[int]) -> str:
        """Text of an answer, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _training_range(self, config: Config) -> tuple[int, int]:
        """Indices [first, last) that training draws from."""
        if self._task.size is None:
            return 0, EVAL_OFFSET
        first = getattr(self._task, "held_out", 0) or config.eval.questions
        if first >= self._task.size:
            raise ConfigError(
                "eval.questions",
                config.eval.questions,
                f"The task has {self._task.size} questions; none would be left to train on.",
            )
        return first, self._task.size

    def _draw_held_out(self, config: Config) -> list[Prompt]:
        """Distinct evaluation prompts."""
        offset = EVAL_OFFSET if self._task.size is None else 0
        limit = MAX_SKIPS if self._task.size is None else self._training_range(config)[0]
        prompts: dict[tuple[int, ...], Prompt] = {}
        for index in range(limit):
            if len(prompts) == config.eval.questions:
                break
            prompt = self._render(self._task.question(offset + index), f"eval{index:08d}")
            prompts.setdefault(tuple(prompt.token_ids), prompt)
        if len(prompts) < config.eval.questions:
            raise ConfigError(
                "eval.questions",
                config.eval.questions,
                f"The task has only {len(prompts)} distinct questions to hold out.",
            )
        return list(prompts.values())

    def _training(self, first: int, last: int, held_out: set[tuple[int, ...]]) -> Iterator[Prompt]:
        """Questions in an order that the seed fixes; a finite task is reshuffled every epoch."""
        skipped, serial = 0, 0
        for index in self._indices(first, last):
            prompt = self._render(self._task.question(index), f"p{serial:08d}")
            if tuple(prompt.token_ids) in held_out:
                skipped += 1
                if skipped == MAX_SKIPS:
                    raise ConfigError(
                        "eval.questions",
                        len(held_out),
                        f"{MAX_SKIPS} training questions in a row are evaluation questions: the task is too small.",
                    )
                continue
            skipped = 0
            serial += 1
            yield prompt

    def _indices(self, first: int, last: int) -> Iterator[int]:
        if self._task.size is None:
            while True:
                yield self._order.randrange(first, last)
        while True:
            epoch = list(range(first, last))
            self._order.shuffle(epoch)
            yield from epoch

    def _render(self, question: Question, uid: str) -> Prompt:
        ids = self._tokenizer.apply_chat_template(
            question["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) > self._longest:
            raise ConfigError(
                "rollout.max_new_tokens",
                len(ids),
                f"Prompt {uid} is longer than the {self._longest} tokens that the model's length leaves.",
            )
        return Prompt(uid, list(ids), question)


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
