"""Configuration of tasks, their environments, and evaluation."""

from __future__ import annotations

from asyncrl.config.secret_values import Parameters
from asyncrl.settings import Count, Name, Natural, Positive, Section


class EnvironmentsConfig(Section):
    """Hosting and limits of a task's environments, if it has any; times are in seconds."""

    hosted: bool | None
    """Run environments in separate processes, which may hang or die without harming the run. unset: only those whose
    steps are not async, since they would block the event loop."""
    per_process: Count
    """Environments per process: if one hangs or kills the process, the episodes of the others are played again."""
    concurrency: Count | None
    """Maximum number of concurrent environments; unset: one per running episode."""
    warm: Natural
    """Number of environments created ahead of their episodes."""
    reset_timeout: Positive
    """Timeout of creating, resetting and closing an environment."""
    step_timeout: Positive
    """Timeout of one step."""
    max_failures: Count
    """Number of consecutive failures after which episodes wait until a trial episode succeeds."""
    patience: Positive
    """Maximum time that episodes wait; then the run ends and names the environment. An environment with which no
    episode has succeeded yet gets 30 s at most."""


class TaskConfig(Section):
    """Source of prompts and scoring of answers."""

    kind: str
    """reasoning_gym (generated problems), copy (toy task of copying digits), file (your own questions), hf (a dataset
    of the Hugging Face Hub, or a folder that holds one), benchmark (public test sets, only in eval.sets), one of
    another extension, or the import path module:name of your own class, which provides questions and scores or plays
    them (asyncrl/tasks/custom.py)."""
    name: str
    """reasoning_gym, benchmark: name of the dataset; otherwise a label."""
    params: Parameters
    """reasoning_gym: arguments of the dataset; copy: digits; your own class: its arguments."""
    agent: str | None
    """Agent that plays this task, instead of the run's agent; unset: the one that the task itself provides, or the
    run's."""
    agent_params: Parameters
    """Arguments of the agent; if the task provides an environment and agent is unset, those of MultiTurn
    (max_turns)."""
    tools: list[Parameters]
    """Tools that the model may call before it answers: Python functions, MCP servers, a Python sandbox
    (docs/agents.md)."""
    tool_options: Parameters
    """Syntax, execution and display of tool calls (docs/agents.md)."""
    environments: EnvironmentsConfig
    system: str | None
    """System message."""
    shots: Natural
    """Number of worked examples before each question."""
    train_file: str | None
    """file: JSONL or parquet file of the training questions; for an evaluation set without eval_file, its questions."""
    eval_file: str | None
    """file: JSONL or parquet file of the evaluation questions; unset: the first `eval.questions` of train_file are held
    out."""
    dataset: str | None
    """hf: name of a dataset, as openai/gsm8k, which needs asyncrl[hf] and is downloaded once; or a folder with files
    named after splits (parquet, JSONL or arrow)."""
    subset: str | None
    """hf: configuration of the dataset, as main of openai/gsm8k, or a folder within the folder."""
    train_split: str | None
    """hf: split of the training questions, which is no test split; in an evaluation set, its questions."""
    eval_split: str | None
    """hf: split of the evaluation questions; unset: the first `eval.questions` of train_split are held out."""
    prompt_key: str
    """file, hf: field that holds the question (text, or a list of chat messages)."""
    answer_key: str
    """file, hf: field that holds the reference answer."""
    image_key: str | None
    """file: field that holds the question's image, or a list of images: a path, the bytes of a file, base64, or Hugging
    Face's {bytes, path}. They take the places of <image> in a text, of parts of type image in messages, or, without
    either, come first."""
    image_folder: str | None
    """file: folder of the images' paths, outside of which no file is read; unset: the folder of the question file."""
    reward: str | None
    """Scorer of answers, instead of the task's own: one of those in docs/rewards.md (exact, number, math, code, judge,
    weighted, ...), or an import path module:name of a plain or async function (answer text, record) -> float, or of a
    reward (asyncrl/rewards/reward.py). Not called if an agent or an environment computes the reward itself."""
    reward_params: Parameters
    """Arguments of the reward."""
    weight: Positive
    """Sampling weight of this task's prompts, relative to the other tasks."""
    group_size: Count | None
    """Completions per prompt; unset: rollout.group_size."""

    @property
    def has_rows(self) -> bool:
        """Whether the questions are rows of files or of a dataset, which hold answers but no score."""
        return self.kind == "file" or self.dataset is not None


class EvalConfig(Section):
    """Evaluation on held-out questions of every task, and on additional sets, by the same engines."""

    questions: Natural
    """Number of questions held out of each task; 0 disables evaluation. It also limits how many questions of evaluation
    files and additional sets are asked. Training never draws any of them."""
    every: Count | None
    """Also evaluate every this many versions, concurrently with training; unset: only before and after."""
    samples: Natural
    """Number of sampled answers per question, in addition to the greedy one, for pass@k."""
    temperature: Positive
    """Sampling temperature of those answers."""
    max_running: Count
    """Maximum number of questions in flight, which limits how many evaluation requests can be queued ahead of
    training's."""
    sets: dict[Name, TaskConfig]
    """Additional sets of questions, by name: +task@eval.sets.NAME=OPTION. Their weight and group_size are ignored."""
