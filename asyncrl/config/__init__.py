"""Configuration schema: strict, immutable pydantic models, one class per group of `conf/`.

Hydra composes the YAML files and `load` validates the result once. The launcher writes it to `config.json` in the run
folder, from which every other process reads it. Values live in `conf/`; meanings and limits live here, so that no
default is written twice. `asyncrl-train --help` prints the docstrings below.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, model_validator

from asyncrl import extension
from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.config.adapters import check_adapters
from asyncrl.config.algorithm import AlgoConfig, ShapingConfig
from asyncrl.config.batch_parts import check_batch_parts
from asyncrl.config.colocated import check_colocated
from asyncrl.config.generation import (
    AuxiliaryModelConfig,
    EngineConfig,
    RolloutConfig,
)
from asyncrl.config.overlap import check_overlap
from asyncrl.config.roles import AgentsConfig, PastConfig, check_roles
from asyncrl.config.rules import Rule, require
from asyncrl.config.running import (
    ENGINE_FRACTION,
    TRANSPORTS,
    USABLE,
    CheckpointConfig,
    ClusterConfig,
    MetricsConfig,
    ReplayConfig,
    RunConfig,
    WeightsConfig,
)
from asyncrl.config.secret_values import Parameters, secrets
from asyncrl.config.server_args import check_server_args
from asyncrl.config.tasks import EvalConfig, TaskConfig
from asyncrl.config.training import ModelConfig, OptimizerConfig, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.removed import MOVED_SETTINGS, removal
from asyncrl.settings import Choice, Name, Section

__all__ = [
    "AgentsConfig",
    "AlgoConfig",
    "AuxiliaryModelConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "EngineConfig",
    "EvalConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PastConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "ShapingConfig",
    "TaskConfig",
    "TrainerConfig",
    "WeightsConfig",
    "cache_tokens",
    "load",
    "on_gpu",
    "read",
    "streams",
    "under_new_names",
]


ALONE = tuple(name for name in ADVANTAGES if ADVANTAGES.traits(Choice(name=name)).alone)
"""Advantage estimators that work without siblings in a group; turn_loo compares the forks of an episode."""


class Config(Section):
    """The complete configuration of a run. Sections beside the fields below are those of extensions."""

    model_config = ConfigDict(extra="allow")

    mode: Literal["train", "rollout_only", "replay"]
    """train: engines generate and trainers train. rollout_only: only engines run, with their initial weights, and their
    output is recorded. replay: only trainers run and train the batches of a recording in its order. The same batches
    give bitwise identical weights; a different algorithm can be tested on the same data."""
    record: bool
    """Record all groups, and every event that determines the order of the run, in records/ of the run folder."""
    deterministic: bool
    """Bitwise reproducible tokens and weights, also when resumed from a checkpoint: every sample has its own seed, and
    engines process one request at a time on a CPU and use batch-invariant kernels on a GPU. Slow. Requires
    rollout.max_staleness=0, since otherwise timing would decide which weights generate a token
    (docs/runs.md)."""
    replay: ReplayConfig
    resume: str | None
    """auto: resume from the newest complete checkpoint in the run folder, or start fresh if there is none. Otherwise
    the folder of a checkpoint, or of a run whose newest checkpoint is used; the resumed run then writes to a run folder
    of its own. unset: start fresh."""
    checkpoint: CheckpointConfig
    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig
    engine: EngineConfig
    rollout: RolloutConfig
    algo: AlgoConfig
    agent: str
    """Agent that plays an episode, as an import path module:name: an async function of (prompt, generate), or a class
    with such a method named run. A task may define its own agent."""
    agent_params: Parameters
    """Arguments of the agent besides prompt and generate; for a class, its constructor arguments."""
    agents: AgentsConfig
    task: TaskConfig
    tasks: dict[Name, TaskConfig]
    """Several tasks instead of `task`, by name, mixed according to their weights: +task@tasks.NAME=OPTION."""
    eval: EvalConfig
    weights: WeightsConfig
    cluster: ClusterConfig
    metrics: MetricsConfig
    extensions: dict[Name, str]
    """Extensions by name, each as an import path module:Class; the section of that name has its settings:
    +extensions.NAME=PATH +NAME.SETTING=VALUE (docs/extensions.md). Those of installed packages need not be named."""

    @model_validator(mode="before")
    @classmethod
    def _sections_of_extensions(cls, values: dict[str, Any]) -> dict[str, Any]:
        kinds = extension.classes(values.get("extensions") or {})
        sections = extension.sections(kinds)
        for name, kind in sections.items():
            if name in cls.model_fields:
                remedy = "A section of the core has this name: choose another."
                raise ConfigError(f"extensions.{name}", kind.__qualname__, remedy)
        for name in values.keys() - cls.model_fields.keys() - sections.keys():
            remedy = removal(name, values[name]) or f"No such section, and no extension has this name: {SPELLING}"
            raise ConfigError(name, values[name], remedy)
        core = {name: value for name, value in values.items() if name not in sections}
        return core | {name: _section(kind, name, values.get(name, {})) for name, kind in sections.items()}

    @model_validator(mode="after")
    def _settings_agree(self) -> Config:
        bound, lead = self.rollout.max_staleness, self.rollout.effective_lead
        if lead > bound:
            raise ConfigError(
                "rollout.lead",
                lead,
                f"Must not exceed rollout.max_staleness ({bound}): lower it, or leave it unset.",
            )
        buffer, longest = self.algo.shaping.overlong_buffer, self.rollout.max_new_tokens
        if buffer is not None and buffer > longest:
            raise ConfigError(
                "algo.shaping.overlong_buffer", buffer, f"Must not exceed rollout.max_new_tokens ({longest})."
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
        if self.deterministic and self.rollout.max_staleness and self.mode != "replay":
            raise ConfigError(
                "rollout.max_staleness",
                self.rollout.max_staleness,
                "With deterministic=true, weights must not change while engines generate: set 0, or record an "
                "asynchronous run (record=true) and replay it.",
            )
        if self.mode == "rollout_only" and not self.record:
            raise ConfigError("record", False, "mode=rollout_only produces nothing but a recording: set record=true.")
        if (self.mode == "replay") != (self.replay.source is not None):
            remedy = "replay.from names the run to replay: set mode=replay and replay.from=FOLDER together."
            raise ConfigError("replay.from", self.replay.source, remedy)
        if self.resume is not None and (self.mode == "rollout_only" or self.replay.schedule):
            what = "mode=rollout_only" if self.mode == "rollout_only" else "replay.schedule"
            raise ConfigError("resume", self.resume, f"{what} always starts from the beginning: remove this setting.")
        if self.checkpoint.every and self.mode == "rollout_only":
            raise ConfigError("checkpoint.every", self.checkpoint.every, "mode=rollout_only trains nothing: remove it.")
        for field, value, names in (
            ("weights.transport", self.weights.transport, [*TRANSPORTS, *extension.transports(self.extensions)]),
            ("trainer.lora.base", self.trainer.lora.base, ["none", *extension.bases()]),
        ):
            if value not in names:
                raise ConfigError(field, value, f"Must be one of {', '.join(names)}.")
        self._check_sets()
        self._check_elastic()
        check_server_args(self)
        check_batch_parts(self)
        check_overlap(self)
        check_colocated(self)
        check_roles(self)
        check_adapters(self)
        self._check_tasks()
        launchers = ["local", *extension.clusters(self.extensions)]
        if self.cluster.launcher not in launchers:
            remedy = f"No extension that is installed has this cluster: choose one of {launchers}."
            raise ConfigError("cluster.launcher", self.cluster.launcher, remedy)
        self._check_extensions()
        return self

    def _check_tasks(self) -> None:
        for name, task in self.mixture.items():
            if task.kind == "benchmark":
                remedy = (
                    f"{task.name} is a public test set: evaluate with it, by +task@eval.sets.{task.name}={task.name}, "
                    "and train on other questions (task=file, gsm_symbolic, programs)."
                )
                raise ConfigError(f"{self.field_of(name)}.kind", "benchmark", remedy)
            if task.kind == "hf" and re.search(r"(^|\W)test", task.train_split or "", re.IGNORECASE):
                remedy = (
                    "Training on a test set makes it useless for evaluation: name another split, and set eval_split, "
                    "or add it as a set of eval.sets."
                )
                raise ConfigError(f"{self.field_of(name)}.train_split", task.train_split, remedy)
        for name, task in (self.mixture | self.eval.sets).items():
            asked = task.eval_file if name in self.eval.sets else None
            if task.kind == "hf" and not (task.train_split or task.eval_split):
                raise ConfigError(f"{self.field_of(name)}.train_split", None, "Name a split of the dataset, as train.")
            if task.kind == "file" and task.train_file is None and asked is None:
                field = f"{self.field_of(name)}.train_file"
                raise ConfigError(field, None, "task.kind=file needs the path of a .jsonl or .parquet file.")
        sizes = {f"{self.field_of(name)}.group_size": task.group_size for name, task in self.mixture.items()}
        for field, size in {"rollout.group_size": self.rollout.group_size, **sizes}.items():
            advantage = self.algo.advantage
            if size == 1 and not advantage.is_own and advantage.name not in ALONE:
                remedy = f"algo.advantage={advantage.name} compares siblings: set 2 or more, or one of {ALONE}."
                raise ConfigError(field, 1, remedy)

    def _check_extensions(self) -> None:
        active, named = extension.active(self).values(), self.algo.kl.reference
        references = ["weights", *(name for one in active for name in one.references)]
        if named not in references:
            remedy = f"No extension that is installed has this reference: choose one of {references}."
            raise ConfigError("algo.kl.reference", named, remedy)
        served = {field for one in active for field in one.serves}
        needed = {"replay.schedule": self.replay.schedule, "replay.compare": self.replay.compare}
        for field, asked_for in needed.items():
            if asked_for and field not in served:
                raise ConfigError(field, asked_for, extension.NOBODY)
        for problem in (problem for one in active for problem in one.check(self)):
            raise problem
        if self.algo.advantage.name == "none" and not any(one.signal for one in active):
            remedy = (
                "Nothing would be learned: choose another estimator, or an extension's own signal, as distillation."
            )
            raise ConfigError("algo.advantage", "none", remedy)

    def _check_sets(self) -> None:
        if self.eval.sets and not self.eval.questions:
            raise ConfigError(
                "eval.questions", 0, f"The sets {sorted(self.eval.sets)} would get no questions: raise it."
            )
        if twice := sorted(self.eval.sets.keys() & self.mixture.keys()):
            raise ConfigError(
                "eval.sets", twice[0], "A task has this name and its own held-out questions: choose another name."
            )

    def _check_elastic(self) -> None:
        if self.cluster.elastic == "off":
            return
        least, most = self.cluster.min_engines, self.cluster.max_engines
        count = self.engine.started + len(self.engine.urls)
        rules: list[Rule] = [
            ("mode", self.mode != "train", "Only a run that trains can be elastic"),
            ("cluster.placement", self.cluster.shares_gpus, "The engines' GPUs are those of the trainers"),
            ("metrics.timeline", not self.metrics.timeline, "Decisions need the lengths of episodes: set true"),
            ("cluster.min_engines", least > count, f"The run starts with {count} engines: lower it"),
            ("cluster.max_engines", most is not None and most < count, f"It starts with {count}: raise it"),
        ]
        require(self, rules, ", or set cluster.elastic=off.")

    @property
    def frozen(self) -> dict[str, AuxiliaryModelConfig]:
        """Return the models that are not trained and have engines of their own, by role: the name of the section."""
        extra = (self.model_extra or {}).items()
        return {name: section for name, section in extra if isinstance(section, AuxiliaryModelConfig)}

    @property
    def fleets(self) -> dict[str, EngineConfig | AuxiliaryModelConfig]:
        """Return the sections of all engines by name."""
        return {"engine": self.engine, **self.frozen}

    @property
    def mixture(self) -> dict[str, TaskConfig]:
        """Return the training tasks by name: `tasks`, or `task` alone."""
        return dict(self.tasks) or {self.task.name: self.task}

    @property
    def eval_sets(self) -> dict[str, TaskConfig]:
        """Return the evaluation sets by name: the held-out questions of every task, and the additional sets."""
        return self.mixture | self.eval.sets if self.eval.questions else {}

    @property
    def engine_fraction(self) -> float | None:
        """Return the fraction of a GPU's memory for an engine's weights and KV cache; None if SGLang chooses it."""
        return self.engine.memory_fraction or (ENGINE_FRACTION if self.cluster.placement == "shared" else None)

    @property
    def trainer_fraction(self) -> float | None:
        """Return the fraction of a GPU's memory that a trainer rank may use besides its libraries; None for all."""
        return USABLE - (self.engine_fraction or 0.0) if self.cluster.placement == "shared" else None

    @property
    def serves_adapters(self) -> bool:
        """Return whether every version is an adapter of its own in the engines. Requires a resolved weights.lora."""
        return self.trainer.lora.rank is not None and self.weights.lora == "versions" and self.mode == "train"

    @property
    def transport(self) -> extension.OfferedTransport | None:
        """Return the extension's transport that the run uses; None for one of the core."""
        return extension.transports(self.extensions).get(self.weights.transport)

    @property
    def sends_files(self) -> bool:
        """Return whether versions travel as files in weights.folder."""
        return self.weights.transport == "disk" or bool(self.transport and self.transport.by_file)

    @property
    def weight_loader(self) -> str | None:
        """Return the custom weight loader that engines need. SGLang accepts only those that it was started with."""
        return self.transport.loader if self.transport else None

    @property
    def recovers(self) -> bool:
        """Return whether trainers and the rollout process are started again when they die: not yet where trainers hand
        over their GPUs, or where versions are adapters."""
        asked = self.cluster.on_death == "recover" and self.mode == "train" and bool(self.checkpoint.every)
        return asked and not self.cluster.takes_turns and self.weights.lora != "versions"

    @property
    def changes_base(self) -> bool:
        """Return whether the engines' policy differs from the model folder before the first step, so that they need
        weights of the trainers first."""
        lora = self.trainer.lora
        adapted = lora.rank is not None and (lora.path is not None or lora.base != "none")
        return self.mode == "train" and (adapted or extension.needs_weights(self))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the trained adapters in order."""
        return self.agents.adapters

    def adapter_of(self, role: str) -> str:
        """Return the adapter that plays and trains a role. Raises ConfigError if it has none."""
        return self.agents.adapter_of(role)

    def past_versions(self, version: int) -> dict[str, list[int]]:
        """Return the past versions of each adapter that episodes may use while `version` is the newest."""
        bound = self.rollout.max_staleness
        return {adapter: past.needed(version, bound) for adapter, past in self.agents.past.items()}

    def group_size(self, name: str) -> int:
        """Return the number of completions per prompt of this task."""
        return self.mixture[name].group_size or self.rollout.group_size

    def field_of(self, name: str) -> str:
        """Return the config field that holds this task or set."""
        if name in self.eval.sets:
            return f"eval.sets.{name}"
        return f"tasks.{name}" if self.tasks else "task"


def load(values: dict[str, Any]) -> Config:
    """Validate composed values. Raises ConfigError with one line per invalid field, and for a value that refers to a
    missing environment variable (secrets.py)."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise _explained(error) from None
    for field, secret in secrets(config):
        if secret.missing:
            remedy = (
                f"The environment variable {', '.join(secret.missing)} is not set: export it before you start "
                "the command."
            )
            raise ConfigError(field, secret, remedy)
    return config


def read(run_dir: Path) -> Config:
    """Read the configuration of a run from the config.json that its launcher wrote."""
    return load(json.loads((run_dir / "config.json").read_text()))


def under_new_names(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier run, with those that moved in their new sections."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in recorded.items()}
    for old, new in MOVED_SETTINGS.items():
        section, _, field = old.partition(".")
        into, _, name = new.partition(".")
        if not field and section in found:
            found[into] = found.pop(section)
        elif field in (found.get(section) or {}):
            value = found[section].pop(field)
            found.setdefault(into, {}).update({name: value} if name else value)
    return found


SPELLING = "check the spelling (asyncrl-train --help lists every field)."
REMEDIES = {
    "extra_forbidden": f"No such field: {SPELLING}",
    "missing": "This field has no value: set it, or take it from a group file in conf/.",
}


def _section(kind: type[Section], name: str, values: Any) -> Section:
    """Validate the settings of an extension. Raises ConfigError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explained(error, f"{name}.") from None


def _explained(error: ValidationError, prefix: str = "") -> ConfigError:
    """Convert a pydantic error to field, value and remedy, one line per problem. `prefix` goes before each field."""
    problems = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            problems.append(cause)
            continue
        field = prefix + ".".join(str(part) for part in item["loc"])
        value = None if item["type"] == "missing" else item["input"]
        named = ".".join(part for part in item["loc"] if isinstance(part, str))  # without places in a list
        remedy = removal(named, value) or REMEDIES.get(item["type"], item["msg"] + ".")
        problems.append(ConfigError(field, value, remedy))
    first, *others = problems
    remedy = "\n".join([first.remedy, *map(str, others)])
    return ConfigError(first.field, first.value, remedy)


def on_gpu(section: TrainerConfig | EngineConfig | AuxiliaryModelConfig, gpus: int) -> bool:
    """Return whether the processes of this section run on GPUs."""
    return section.device == "cuda" or (section.device == "auto" and gpus > 0)


CPU_CACHE_TOKENS = 16_384
"""KV cache of an engine on a CPU, where SGLang would take most of the machine's memory for it."""


def cache_tokens(section: EngineConfig | AuxiliaryModelConfig, *, gpu: bool) -> int | None:
    """Return the KV cache size with which an engine is started; None on a GPU if it takes what fits."""
    return section.max_total_tokens or (None if gpu else CPU_CACHE_TOKENS)


def streams(weights: WeightsConfig, *, gpu: bool) -> bool:
    """Return whether buckets are filled during the pause, in two buckets of memory. `gpu` is the trainer's."""
    return weights.staging == "stream" or (weights.staging == "auto" and gpu and not weights.overlap)
