"""Estimate of the duration of a step and of the run on CPUs, reported before the run begins.

machine.json in the run folder holds the estimate beside the chosen dtypes; the summary compares it with the actual
duration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl import jsonl, tasks
from asyncrl.config import Config
from asyncrl.extensions.plan.estimate import ANSWER, Estimate, MachineRates, ModelSize, StepWorkload, estimate
from asyncrl.extensions.plan.settings import adapters_of
from asyncrl.extensions.plan.shapes import counted, shape_of
from asyncrl.launch.checks.model_files import read_model
from asyncrl.launch.precision import Precision
from asyncrl.network.addresses import MACHINE
from asyncrl.tasks import Task
from asyncrl.tasks.build import build_all

SAMPLED = 4
"""Number of questions per task whose length is measured."""
PER_MESSAGE = 5
"""Tokens that a chat template adds to each message."""
PER_TOKEN = 4
"""Characters per token, if there is no tokenizer.json."""


def forecast(config: Config, folder: Path, hf: dict[str, Any], precision: Precision) -> Estimate | None:
    """Estimate one training run; None if trainer or engines run on GPUs, or do not run at all. `folder` is the model
    folder, `hf` its config.json."""
    rates = {choice.part: choice.rates for choice in precision.choices}
    trainer, engine = rates.get("trainer"), rates.get("engine")
    if config.mode != "train" or trainer is None or engine is None:
        return None
    machine = MachineRates(
        train=trainer.train[config.trainer.dtype],
        generate=engine.generate[config.engine.dtype],
        trainers=config.trainer.world_size,
        engines=max(1, config.engine.started) * config.engine.ranks,
        cores=trainer.cores if trainer.host == engine.host else trainer.cores + engine.cores,
        two=min(trainer.two, engine.two),
    )
    return estimate(model_size(config, folder, hf), workload(config, folder), machine)


def model_size(config: Config, folder: Path, hf: dict[str, Any]) -> ModelSize:
    """Return the number of parameters that each token is multiplied with."""
    shape = shape_of(hf)
    weights = counted(read_model(folder, "model.path").weights.items(), shape)
    return ModelSize.of(weights, shape, adapters_of(config.trainer.lora))


def in_words(expected: Estimate) -> str:
    """Return the estimate in words, for the console and --check."""
    return (
        f"estimate: {duration(expected.run)} for the run, {duration(expected.step)} a step (trainer "
        f"{duration(expected.trainer)}, engines {duration(expected.engines)}), from the measured speed of this CPU"
    )


def write(run_dir: Path, expected: Estimate | None) -> None:
    """Add the estimate to machine.json."""
    content = json.loads((run_dir / MACHINE).read_text())
    jsonl.replace(run_dir / MACHINE, {**content, "estimate": asdict(expected) if expected else None})


def duration(seconds: float) -> str:
    """Format a duration for people to read."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def workload(config: Config, folder: Path) -> StepWorkload:
    """Return the token counts of a step, from the questions of the run's tasks."""
    rollout = config.rollout
    beginning, question = _prompt_tokens(config, folder, build_all(config))
    weights = {name: task.weight for name, task in config.mixture.items()}
    sizes = sum(weight * config.group_size(name) for name, weight in weights.items())
    return StepWorkload(
        groups=rollout.batch_groups,
        group_size=sizes / sum(weights.values()),
        beginning=beginning,
        question=question,
        answer=max(1.0, ANSWER * rollout.max_new_tokens),
        steps=config.run.max_steps,
        share_prompts=config.trainer.share_prompts,
        synchronous=rollout.max_staleness == 0,
        questions=config.eval.questions * len(config.eval_sets),
    )


def _prompt_tokens(config: Config, folder: Path, built: Mapping[str, Task]) -> tuple[float, float]:
    """Return the number of tokens in the common prefix of a task's prompts, and the number of further tokens per
    prompt, averaged over the tasks."""
    split = _tokenizer(folder)
    common, further = [], []
    for name, task in built.items():
        prompts = []
        for index in range(min(SAMPLED, task.size or SAMPLED)):
            question = tasks.ask(task, index, config.field_of(name))
            contents = [str(message["content"]) for message in question["messages"]]
            prompts.append([token for text in contents for token in [*[None] * PER_MESSAGE, *split(text)]])
        same = 0
        while len({prompt[same] if same < len(prompt) else same for prompt in prompts}) == 1 and same < len(prompts[0]):
            same += 1
        common.append(same)
        further.append(sum(map(len, prompts)) / len(prompts) - same)
    return sum(common) / len(common), sum(further) / len(further)


def _tokenizer(folder: Path) -> Callable[[str], list[Any]]:
    """Return a function that splits text into tokens."""
    if not (folder / "tokenizer.json").is_file():
        return lambda text: [text[start : start + PER_TOKEN] for start in range(0, len(text), PER_TOKEN)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
