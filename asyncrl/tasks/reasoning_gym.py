"""Questions and scores from reasoning-gym's generators (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Task as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Question
from asyncrl.tasks.chats import head

ENDLESS = 2**31 - 1  # a virtual size: questions are made when they are asked for
SHOT_SEED = 99  # examples come from another stream than the questions


class ReasoningGym:
    """One generator. Rewards are 0 or 1: partial credit for wrong answers would be learnt in their place."""

    size = None
    inline = True

    def __init__(self, config: TaskConfig) -> None:
        import reasoning_gym

        try:
            self._questions = reasoning_gym.create_dataset(config.name, size=ENDLESS, seed=1, **config.params)
            shots = reasoning_gym.create_dataset(
                config.name, size=max(1, config.shots), seed=SHOT_SEED, **config.params
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                "task.name / task.params", (config.name, config.params), f"reasoning-gym refuses: {error}"
            ) from None
        examples = (shots[i] for i in range(config.shots))
        self._head = head(config.system, ((one["question"], str(one["answer"])) for one in examples))

    def question(self, index: int) -> Question:
        """The generator's entry, after the worked examples."""
        entry: dict[str, Any] = self._questions[index]
        asked = {"role": "user", "content": entry["question"]}
        return {"messages": [*self._head, asked], "entry": entry, "answer": str(entry["answer"])}

    def score(self, answer: str, question: Question) -> float:
        """1.0 for a right answer, by the generator's own verifier (below 0.999 it only gives credit for form)."""
        text = answer.strip()
        return float(text != "" and self._questions.score_answer(text, question["entry"]) >= 0.999)

    def correct(self, reward: float) -> bool:
        """Rewards are accuracies."""
        return reward >= 1.0
