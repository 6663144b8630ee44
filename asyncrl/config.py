"""The whole configuration, as strict immutable models: one class per group of `conf/`.

Hydra composes the YAML files, `load` validates the result once, and every other process reads the `config.json`
that the launcher leaves in the run folder. Values live in `conf/`, meanings and limits live here: no default is
written twice. `asyncrl-train --help` prints the docstrings below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from asyncrl.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of settings: immutable, strictly typed, and closed to unknown names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )  # infinity has no JSON: the other processes would read null


class Run(Section):
    """What this run is, where it writes, and when it ends."""

    name: str
    """Name of the run; part of the default folder."""
    dir: str
    """Run folder. Must be new or empty, unless `run.overwrite` is set."""
    overwrite: bool
    """Empty an existing run folder first (only a folder that holds a config.json of a run)."""
    seed: Natural
    """Seed of the prompt order, of tiny models and of Megatron."""
    max_steps: Count
    """Stop after this many batches."""
    token_budget: Count | None
    """Stop once this many tokens have been generated for training."""
    reward_target: float | None
    """Stop once the mean reward over `run.reward_window` steps reaches this."""
    reward_window: Count
    """Steps over which rewards are averaged, in the stop rule and in the summary."""


class Model(Section):
    """The model to train."""

    path: str
    """An HF folder (config.json, safetensors, tokenizer), or builtin:smollm2-135m, or builtin:tiny."""
    chat_template: str | None
    """A jinja file that replaces the tokenizer's chat template."""


class Optimizer(Section):
    """AdamW with fp32 master weights, and its learning-rate schedule."""

    lr: Positive
    """Peak learning rate."""
    min_lr: NonNegative
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the decay after the warm-up."""
    warmup_steps: Natural
    """Steps of linear warm-up from 0."""
    decay_steps: Count | None
    """Step at which min_lr is reached; unset: run.max_steps."""
    beta1: Share
    """Decay of the mean of gradients."""
    beta2: Share
    """Decay of the mean of their squares."""
    eps: Positive
    """Added to the root of that mean."""
    weight_decay: NonNegative
    """Decoupled weight decay."""
    clip_grad: NonNegative
    """Clip the global gradient norm to this; 0 turns clipping off."""


class Trainer(Section):
    """Megatron: layout, precision, optimizer, and what to do with a bad step."""

    device: Literal["auto", "cpu", "cuda"]
    """Where the ranks run; auto takes CUDA when the machine has it."""
    tensor_parallel: Count
    """Ranks that share each matrix."""
    pipeline_parallel: Count
    """Ranks that share the layers."""
    virtual_pipeline: Count
    """Chunks of layers that each pipeline stage holds, interleaved with those of the other stages; 1: one."""
    data_parallel: Count
    """Replicas that share each batch."""
    expert_parallel: Count
    """Ranks that share the routed experts of a mixture-of-experts layer."""
    expert_tensor_parallel: Count | None
    """Ranks that share each matrix of a routed expert; unset: tensor_parallel."""
    sequence_parallel: bool
    """Split activations along the sequence between the tensor-parallel ranks."""
    dtype: Literal["bfloat16", "float32"]
    """Precision of the weights in forward and backward; the master weights are always float32."""
    micro_batch_tokens: Count
    """Upper limit of packed tokens in one forward pass. A larger group runs alone."""
    share_prompts: bool
    """Run the prompt of a group once and let its completions attend to it (exact; off only to compare)."""
    threads: Count
    """Torch threads of a rank on CPU."""
    optimizer: Optimizer
    on_bad_step: Literal["skip", "stop"]
    """What to do when the gradient norm is not finite or above bad_grad_norm: skip the update, or end the run."""
    bad_grad_norm: Positive | None
    """Gradient norm (before clipping) above which a step counts as exploding; unset: only NaN and infinity."""
    max_bad_steps: Count
    """Under `skip`, end the run after this many bad steps in a row."""
    save_hf_every: Count | None
    """Write the weights as an HF folder every so many steps; unset: only at the end."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @model_validator(mode="after")
    def _layout_is_possible(self) -> Trainer:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("trainer.sequence_parallel", True, "Needs trainer.tensor_parallel of 2 or more.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                "trainer.virtual_pipeline", self.virtual_pipeline, "Needs pipeline_parallel of 2 or more."
            )
        stage, matrix = self.tensor_parallel * self.data_parallel, self.expert_tensor_parallel or self.tensor_parallel
        if stage % (matrix * self.expert_parallel):
            field = "expert_parallel" if stage % matrix == 0 else "expert_tensor_parallel"
            raise ConfigError(
                f"trainer.{field}",
                getattr(self, field),
                f"expert_tensor_parallel × expert_parallel ({matrix * self.expert_parallel}) must divide the {stage} "
                "ranks of a pipeline stage (tensor_parallel × data_parallel): raise trainer.data_parallel or lower it.",
            )
        return self


class Engine(Section):
    """The fleet of SGLang servers, and the router in front of it."""

    count: Count
    """Number of engines."""
    tensor_parallel: Count
    """GPUs (or CPU processes) of one engine."""
    device: Literal["auto", "cpu", "cuda"]
    """Where the engines run; auto takes CUDA when the machine has it."""
    dtype: Literal["bfloat16", "float32"]
    """Precision of the weights in the engine."""
    max_total_tokens: Count
    """Tokens of the KV cache of one engine."""
    max_running_requests: Count
    """Requests that one engine decodes at once."""
    stream_interval: Count
    """Tokens between two pieces of a streamed answer: what an engine's death can cost, against work per token."""
    server_args: dict[str, Any]
    """Further SGLang arguments, as name: value (true for a bare flag)."""
    router_policy: Literal["random", "round_robin", "cache_aware", "power_of_two"]
    """How the router picks an engine."""
    start_timeout: Positive
    """Seconds that an engine or the router may take until it is ready."""
    request_timeout: Positive
    """Seconds without a byte after which a request to the router has failed."""


class Rollout(Section):
    """Asynchrony, and the shape of a batch."""

    batch_groups: Count
    """Groups (prompts) in a batch."""
    group_size: Count
    """Completions of each prompt."""
    max_staleness: Natural
    """Bound, in versions, on the age of every token that is trained. 0 is synchronous, 1 is one step off."""
    lead: Natural | None
    """Batches that may be admitted ahead of the one in training; unset: equal to max_staleness."""
    max_running_groups: Count | None
    """Groups that may be in flight at once; unset: as many as admission allows."""
    agent: str
    """Import path of the agent, module:name."""
    max_new_tokens: Count
    """Longest completion."""
    temperature: Positive
    """Sampling temperature; the trainer divides its logits by the same number."""
    coalesce: bool
    """Send the siblings of a group as one request with n samples."""
    max_failures: Count
    """End the run after this many failed groups in a row."""
    batch_timeout: Positive
    """Seconds that the trainer waits for a batch before it ends the run with what the rollout side was doing."""

    @property
    def effective_lead(self) -> int:
        """The lead in force."""
        return self.max_staleness if self.lead is None else self.lead


class Algo(Section):
    """Advantage, loss and correction."""

    advantage: Literal["grpo", "dr_grpo"]
    """Group-relative advantage: divided by the group's standard deviation (grpo) or not (dr_grpo)."""
    loss: Literal["decoupled_ppo", "tis"]
    """decoupled_ppo: clipped surrogate times the capped engine correction; tis: policy gradient times it."""
    clip_low: Share
    """Lower width of the clip: the ratio to the proximal policy stays above 1 - clip_low."""
    clip_high: NonNegative
    """Upper width of the clip: the ratio stays below 1 + clip_high."""
    correction_cap: Positive
    """Cap of the importance weight between the engine's and the trainer's probability (TIS)."""
    aggregation: Literal["token", "sequence", "constant"]
    """Unit of the mean: tokens, sequences, or sequences of `rollout.max_new_tokens` tokens."""
    entropy_bonus: NonNegative
    """Coefficient of the entropy of the policy in the loss."""


class Task(Section):
    """Where prompts come from and how answers are scored."""

    kind: Literal["reasoning_gym", "copy", "file"]
    """A reasoning-gym generator, the digit-copying toy, or files of your own."""
    name: str
    """reasoning_gym: the dataset's name; otherwise a label."""
    params: dict[str, Any]
    """reasoning_gym: the dataset's arguments; copy: digits."""
    system: str | None
    """System message."""
    shots: Natural
    """Worked examples shown before each question."""
    train_file: str | None
    """file: JSONL or parquet with the training questions."""
    eval_file: str | None
    """file: the same for evaluation; unset: the first `eval.questions` of train_file are held out."""
    prompt_key: str
    """file: field with the question (text, or a list of chat messages)."""
    answer_key: str
    """file: field with the reference answer."""
    reward: str
    """file: `exact`, `contains`, `number`, or an import path module:function of (answer text, record) -> float."""


class Eval(Section):
    """Held-out questions, answered greedily by the same engines."""

    questions: Natural
    """Number of held-out questions; 0 turns evaluation off. Training never draws any of them."""
    every: Count | None
    """Evaluate every so many versions too, beside training; unset: only before and after."""


class Weights(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "tensor", "distributed", "disk", "delta"]
    """tensor: shared memory or CUDA IPC on one host; distributed: gloo or NCCL broadcast; disk: files on a file system
    that engines share; delta: such files with only what changed; auto picks one of the first two and says why."""
    staging: Literal["full", "stream"]
    """full: every bucket is filled before the pause, which is then the shortest, in memory for all weights of a stage;
    stream: two buckets, filled and sent in turn during the pause. Disk and delta write before the pause, from two."""
    bucket_mb: Count
    """Size of a bucket in MiB; a larger tensor travels alone."""
    pause_mode: Literal["in_place", "retract", "abort"]
    """What an update does to requests in flight. in_place: freeze, and go on with the KV cache they have; retract:
    prefill them anew under the new weights; abort: return them unfinished, to be continued as new requests."""
    verify: bool
    """Compare the engines' checksums with those of the weights sent, at the first publish and when an engine joins.
    Off for engines that quantize: what they hold is not what was sent."""
    verify_every: Count | None
    """Compare them every so many versions, too; unset: only then."""
    folder: str | None
    """Where disk and delta write, on a file system that all engines see; unset: weights/ in the run folder."""
    timeout: Positive
    """Seconds that any one call of a publish may take."""


class Cluster(Section):
    """Machines, addresses and how to end."""

    host: str
    """Address that every server binds to."""
    gpus: Natural | None
    """GPUs to use; unset: those that the machine has."""
    on_engine_death: Literal["fail"]
    """What an engine's death means for the run."""
    stop_grace: Positive
    """Seconds between asking a process to stop and killing it."""


class Metrics(Section):
    """Where figures go besides metrics.jsonl and summary.json, which are always written."""

    console: bool
    """A line per step in the terminal."""
    tensorboard: bool
    """Event files in tb/."""


class Config(Section):
    """Everything."""

    run: Run
    model: Model
    trainer: Trainer
    engine: Engine
    rollout: Rollout
    algo: Algo
    task: Task
    eval: Eval
    weights: Weights
    cluster: Cluster
    metrics: Metrics

    @model_validator(mode="after")
    def _settings_agree(self) -> Config:
        bound, lead = self.rollout.max_staleness, self.rollout.effective_lead
        if lead > bound:
            raise ConfigError(
                "rollout.lead",
                lead,
                f"Must not exceed rollout.max_staleness ({bound}): lower it, or leave it unset.",
            )
        optimizer = self.trainer.optimizer
        if optimizer.min_lr > optimizer.lr:
            raise ConfigError(
                "trainer.optimizer.min_lr",
                optimizer.min_lr,
                f"Must not exceed trainer.optimizer.lr ({optimizer.lr}).",
            )
        decay_steps = optimizer.decay_steps or self.run.max_steps
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= decay_steps:
            raise ConfigError(
                "trainer.optimizer.warmup_steps",
                optimizer.warmup_steps,
                f"Must be below the end of the decay ({decay_steps}).",
            )
        if self.task.kind == "file" and self.task.train_file is None:
            raise ConfigError("task.train_file", None, "task.kind=file needs the path of a .jsonl or .parquet file.")
        if self.rollout.group_size == 1:
            raise ConfigError(
                "rollout.group_size", 1, "Group-relative advantages need 2 or more completions of a prompt."
            )
        return self


def load(values: dict[str, Any]) -> Config:
    """Validate composed values; raises ConfigError with one line per wrong field."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explained(error) from None


def read(run_dir: Path) -> Config:
    """The configuration of a run, as its launcher wrote it."""
    return load(json.loads((run_dir / "config.json").read_text()))


REMEDIES = {
    "extra_forbidden": "No such field: check the spelling (asyncrl-train --help lists every field).",
    "missing": "This field has no value: set it, or take it from a group file in conf/.",
}


def _explained(error: ValidationError) -> ConfigError:
    """pydantic's report as field, value and remedy, one line per problem."""
    problems = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            problems.append(cause)
            continue
        field = ".".join(str(part) for part in item["loc"])
        value = None if item["type"] == "missing" else item["input"]
        problems.append(ConfigError(field, value, REMEDIES.get(item["type"], item["msg"] + ".")))
    first, *others = problems
    remedy = "\n".join([first.remedy, *map(str, others)])
    return ConfigError(first.field, first.value, remedy)


def on_gpu(section: Trainer | Engine, gpus: int) -> bool:
    """Whether the processes of this section run on GPUs."""
    return section.device == "cuda" or (section.device == "auto" and gpus > 0)
