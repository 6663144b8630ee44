"""Engines, rollouts, and the questions that they answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from asyncrl.config.secrets import Parameters
from asyncrl.config.section import Count, Dtype, Million, Name, Natural, Positive, Section
from asyncrl.errors import ConfigError


class Engine(Section):
    """The fleet of SGLang servers, and the router in front of it."""

    count: Natural
    """Number of engines that are started; 0 only with `urls`."""
    urls: list[str]
    """Engines that run already, elsewhere, beside those: this run sends them its weights, and requests. They take the
    run's API key, which is then ASYNCRL_API_KEY of the environment (docs/engines.md)."""
    tensor_parallel: Count
    """GPUs (or CPU processes) of one engine."""
    device: Literal["auto", "cpu", "cuda"]
    """Where the engines run; auto takes CUDA when the machine has it."""
    dtype: Dtype
    """Precision of the weights in the engines. auto: bfloat16 on GPUs, on CPUs what they multiply faster."""
    max_total_tokens: Count
    """Tokens of the KV cache of one engine."""
    max_running_requests: Count
    """Requests that one engine decodes at once."""
    stream_interval: Count
    """Tokens between two pieces of a streamed answer: what an engine's death can cost, against work per token."""
    server_args: dict[str, Any]
    """Further SGLang arguments, as name: value (true for a bare flag)."""
    request_fields: Parameters
    """Additional fields of every request to /generate. The router forwards them unchanged."""
    router_policy: Literal["manual", "random", "round_robin", "cache_aware", "power_of_two"]
    """How the router picks an engine. manual: a new group goes to the engine with the fewest requests, and all of its
    requests and turns stay there, with the cache of what they share."""
    start_timeout: Positive
    """Seconds that an engine, the teacher's too, or the router may take until it is ready."""
    request_timeout: Positive
    """Seconds without a byte after which a request to the router has broken."""
    retry_timeout: Positive
    """Seconds for which the rest of a broken answer is asked for anew while no token comes; then its group is given up.
    Longer than an engine takes to start again."""

    @model_validator(mode="after")
    def _has_some(self) -> Engine:
        if not self.count and not self.urls:
            raise ConfigError("engine.count", 0, "Start one at least, or name engines that run already: engine.urls.")
        for url in self.urls:
            if not url.startswith("http://"):
                raise ConfigError("engine.urls", url, "Must be the address of an engine, as http://HOST:PORT.")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("engine.urls", self.urls, "Names an engine twice: leave one out.")
        return self


class Frozen(Section):
    """Engines of a model that is not trained."""

    model: str | None
    """Its HF folder, or a built-in; unset: there is none."""
    count: Count
    """Number of engines that are started."""
    tensor_parallel: Count
    """GPUs (or CPU processes) of one of them."""
    device: Literal["auto", "cpu", "cuda"]
    """Where they run; auto takes CUDA when the machine has it."""
    dtype: Dtype
    """Precision of its weights. auto: bfloat16 on GPUs, on CPUs what they multiply faster."""
    max_total_tokens: Count
    """Tokens of the KV cache of one engine."""
    max_running: Count
    """Requests that may be under way at once: to all engines of a teacher, in each engine of a judge."""
    server_args: dict[str, Any]
    """Further SGLang arguments, as name: value (true for a bare flag)."""

    @property
    def started(self) -> int:
        """Engines that the launcher starts."""
        return self.count if self.model else 0


class Teacher(Frozen):
    """A frozen model on engines of its own that says how likely it finds each token of an episode: to distil from
    (algo.distill_coefficient), or as the reference of the KL (algo.reference). It has the tokenizer of model.path; no
    episode may be longer than its engines' caches."""

    urls: list[str]
    """Engines that serve it already, elsewhere; empty: this run starts `count`. Their API key is taken from the
    environment, ASYNCRL_TEACHER_API_KEY; `model` is then read for its tokenizer and context alone."""
    request_timeout: Positive
    """Seconds that one request may take; then another engine is asked."""
    retry_timeout: Positive
    """Seconds for which an episode is sent anew while no engine answers; then its group is given up, with `teacher` as
    the reason. Longer than an engine takes to start again."""

    @property
    def started(self) -> int:
        """Engines that the launcher starts."""
        return 0 if self.urls else super().started


class Judge(Frozen):
    """A frozen model on engines of its own that judges: what task.reward=judge asks, unless its reward_params.urls name
    other servers (docs/rewards.md)."""


class Rollout(Section):
    """Asynchrony, and the shape of a batch."""

    batch_groups: Million
    """Groups (prompts) in a batch."""
    group_size: Million
    """Completions of each prompt, unless its task says otherwise."""
    max_staleness: Natural
    """Bound, in versions, on the age of every token that is trained. 0 is synchronous, 1 is one step off."""
    lead: Natural | None
    """Batches that may be admitted ahead of the one in training; unset: equal to max_staleness."""
    max_running_groups: Count | Literal["auto"] | None
    """Groups that may be in flight at once. auto: as many as keep engines and trainer busy (rollout/concurrency.py);
    null: as many as admission allows."""
    max_new_tokens: Count
    """Longest completion."""
    overlong_prompts: Literal["skip", "refuse"]
    """What happens to questions that leave no room for max_new_tokens in the model's length. skip: they are left out,
    and counted; refuse: the run does not start. A task of so many questions is looked through before the run; one
    without an end is refused, or goes on with another question, when it comes to such."""
    temperature: Positive
    """Sampling temperature; the trainer divides its logits by the same number."""
    coalesce: bool
    """Send the siblings of a group as one request with n samples."""
    cache_key: Literal["version", "group"]
    """What may share a prefix cache. version: requests of the same weights, so that a later turn after a publish is
    prefilled anew; group: the turns of a group, whatever the weights, as one long answer does under in_place."""
    curriculum: str
    """Import path, module:function of (progress) -> the weights of the tasks, by name, for the next prompt; what is not
    named has none. progress: asyncrl.rollout.curriculum.Progress (asyncrl.rollout.hooks:towards_half_solved prefers
    the tasks that are solved about half of the time)."""
    accept: str
    """Import path, module:function of (group) -> True, or False, or the reason of a rejection: a group that is not
    accepted is counted and replaced by another prompt's (dynamic sampling: asyncrl.rollout.hooks:has_signal)."""
    select: str
    """Import path, module:function of (ready groups, count) -> groups: what fills up a batch beside the groups that
    must go now. There is a choice only with slack (lead below max_staleness)."""
    oversample: Natural
    """Further groups that run with each batch's; the first to end are trained, the others stopped and thrown away.
    Favours short answers."""
    over_age: Literal["wait", "drop"]
    """What happens to a group that is still running when it must be trained: the batch waits for it, or goes without it
    if others are ready. Dropping favours short answers."""
    episode_timeout: Positive | None
    """Seconds that an episode may take in all, its reward included; unset: as long as its parts do."""
    agent_timeout: Positive
    """Seconds that an agent, or the environment it talks to, may go without asking the model for anything. Whatever
    exceeds a limit costs its group, with the limit's name as the reason, and the slot is played anew."""
    reward_timeout: Positive
    """Seconds that the reward of one answer may take."""
    retries: Natural
    """Times that an episode is played anew, or its reward asked for anew, when an environment, a judge or another part
    outside of the program has failed; then its group is rejected, with the reason."""
    max_failures: Count
    """End the run after this many failed groups in a row: those whose agent, environment or reward raised or hung, or
    that no engine answered."""
    max_rejections: Count
    """End the run after this many groups in a row that rollout.accept rejected."""
    batch_timeout: Positive
    """Seconds that the trainer waits for a batch before it ends the run with what the rollout side was doing."""

    @property
    def effective_lead(self) -> int:
        """The lead in force."""
        return self.max_staleness if self.lead is None else self.lead


class Environments(Section):
    """How the environments of a task are kept, if it is played in some; times are seconds."""

    hosted: bool | None
    """In processes of their own, which may hang or die without harm; unset: those whose steps are not async, for they
    would stop everything else."""
    per_process: Count
    """Environments that share a process: if one hangs or kills it, the others' episodes are played again."""
    concurrency: Count | None
    """Environments at once; unset: as many as there are episodes."""
    warm: Natural
    """Environments made ahead of their episodes."""
    reset_timeout: Positive
    """For making one, for its reset and for its end."""
    step_timeout: Positive
    """For one step."""
    max_failures: Count
    """So many failures in a row, and episodes wait until one that tries succeeds."""
    patience: Positive
    """How long they wait; then the run ends and names the environment."""


class Task(Section):
    """Where prompts come from and how answers are scored."""

    kind: str
    """reasoning_gym (a generator), copy (the digit-copying toy), file (questions of your own), benchmark (public test
    sets, in eval.sets alone: asyncrl/tasks/benchmarks.py), or the import path of a class of your own, module:name, with
    its questions and what scores or plays them (asyncrl/tasks/own.py)."""
    name: str
    """reasoning_gym, benchmark: the dataset's name; otherwise a label."""
    params: Parameters
    """reasoning_gym: the dataset's arguments; copy: digits; a class of your own: its arguments."""
    agent: str | None
    """Who plays this task, in the place of the run's agent; unset: that, or what the task itself brings."""
    agent_params: Parameters
    """Its arguments; where the task brings an environment and agent is unset, those of MultiTurn (max_turns)."""
    tools: list[Parameters]
    """What the model may call before it answers: Python functions, MCP servers, a Python sandbox (docs/tools.md)."""
    tool_options: Parameters
    """How its calls are written, run and shown (docs/tools.md)."""
    environments: Environments
    system: str | None
    """System message."""
    shots: Natural
    """Worked examples shown before each question."""
    train_file: str | None
    """file: JSONL or parquet with the training questions; of an evaluation set without eval_file, its questions."""
    eval_file: str | None
    """file: the same for evaluation; unset: the first `eval.questions` of train_file are held out."""
    prompt_key: str
    """file: field with the question (text, or a list of chat messages)."""
    answer_key: str
    """file: field with the reference answer."""
    reward: str | None
    """What scores an answer, in the place of the task's own: one of those in docs/rewards.md (exact, number, math,
    code, judge, weighted, ...), or an import path, module:name, of a function (answer text, record) -> float, plain or
    async, or of a reward (asyncrl/rewards/reward.py). Not asked where an agent or an environment rewards itself."""
    reward_params: Parameters
    """Its arguments."""
    weight: Positive
    """Share of the prompts, relative to the other tasks'."""
    group_size: Count | None
    """Completions of each prompt; unset: rollout.group_size."""


class Eval(Section):
    """Held-out questions of every task, and further sets, answered by the same engines."""

    questions: Natural
    """Questions held out of each task; 0 turns evaluation off. Of evaluation files and further sets, at most this many
    are asked. Training never draws any of them."""
    every: Count | None
    """Evaluate every so many versions too, beside training; unset: only before and after."""
    samples: Natural
    """Answers that are sampled to each question, beside the greedy one, for pass@k."""
    temperature: Positive
    """Their temperature."""
    max_running: Count
    """Questions whose answers may be in flight at once: what training's requests may find before them in the queue."""
    sets: dict[Name, Task]
    """Further sets of questions, by name: +task@eval.sets.NAME=OPTION. Weight and group size mean nothing there."""
