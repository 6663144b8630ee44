"""What this folder adds: three kinds of tasks, and the rule that nothing is trained on a test set."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl import extension
from asyncrl.config import Config
from asyncrl.errors import ConfigError


class Datasets(extension.Extension):
    """Generated problems, datasets of the Hugging Face Hub, and test sets."""

    tasks = {  # noqa: RUF012
        "reasoning_gym": "asyncrl.extensions.datasets.reasoning_gym:ReasoningGym",
        "hf": "asyncrl.extensions.datasets.hf:HfTask",
        "benchmark": "asyncrl.extensions.datasets.benchmarks:Benchmark",
    }

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Yield tasks that train on a test set, and datasets without a split."""
        for name, task in config.mixture.items():
            if task.kind == "benchmark":
                remedy = (
                    f"{task.name} is a public test set: evaluate with it, by +task@eval.sets.{task.name}={task.name}, "
                    "and train on other questions (task=file, gsm_symbolic, programs)."
                )
                yield ConfigError(f"{config.field_of(name)}.kind", "benchmark", remedy)
            if task.dataset and re.search(r"(^|\W)test", task.train_split or "", re.IGNORECASE):
                remedy = (
                    "Training on a test set makes it useless for evaluation: name another split, and set eval_split, "
                    "or add it as a set of eval.sets."
                )
                yield ConfigError(f"{config.field_of(name)}.train_split", task.train_split, remedy)
        for name, task in (config.mixture | config.eval.sets).items():
            if task.kind == "hf" and not (task.train_split or task.eval_split):
                yield ConfigError(
                    f"{config.field_of(name)}.train_split", None, "Name a split of the dataset, as train."
                )


Own = Datasets
