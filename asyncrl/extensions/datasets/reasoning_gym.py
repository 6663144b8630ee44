"""Questions and scores from reasoning-gym's generators (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question, Task, head

ENDLESS = 2**31 - 1  # a virtual size: questions are created on demand
BLOCK = 256
LISTING = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
"""Generators that list all of their questions when created, or refuse a size of ENDLESS: they are created BLOCK at a
time.
"""
SHOT_SEED = 99  # worked examples come from a different stream than the questions


class ReasoningGym(Task):
    """One generator. Rewards are 0 or 1: with partial credit for wrong answers, the policy would learn those
    instead."""

    def __init__(self, config: TaskConfig) -> None:
        import reasoning_gym

        def made(size: int, seed: int) -> Any:
            return reasoning_gym.create_dataset(config.name, size=size, seed=seed, **config.params)

        self._block = BLOCK if config.name in LISTING else ENDLESS
        self._of_block = lru_cache(64)(lambda number: made(self._block, 1 + number * self._block))
        try:
            self._questions = self._of_block(0)
            shots = made(max(1, config.shots), SHOT_SEED)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                "task.name / task.params", (config.name, config.params), f"reasoning-gym rejects it: {error}"
            ) from None
        examples = (shots[i] for i in range(config.shots))
        self._head = head(config.system, ((one["question"], str(one["answer"])) for one in examples))

    def question(self, index: int) -> Question:
        """Return the generator's entry, after the worked examples."""
        block, place = divmod(index, self._block)
        before = random.getstate()
        random.seed(index)  # some generators use the global generator besides their own
        try:
            entry: dict[str, Any] = self._of_block(block)[place]
        finally:
            random.setstate(before)
        asked = {"role": "user", "content": entry["question"]}
        return {**entry, "messages": [*self._head, asked]}

    def score(self, answer: str, question: Question) -> float:
        """Return 1.0 for a correct answer according to the generator's own verifier (below 0.999 it gives credit for
        form only)."""
        text = answer.strip()
        return float(text != "" and self._questions.score_answer(text, question) >= 0.999)
