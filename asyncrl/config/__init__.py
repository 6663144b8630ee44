"""Configuration schema: strict, immutable pydantic models, one class per group of `conf/`.

Hydra composes the YAML files and `load` validates the result once. The launcher writes it to `config.json` in the run
folder, from which every other process reads it. Values live in `conf/`; meanings and limits live here, so that no
default is written twice. `asyncrl-train --help` prints the docstrings below.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, model_validator

from asyncrl import extension, lookup
from asyncrl.config.algorithm import AlgoConfig, ShapingConfig
from asyncrl.config.generation import (
    AuxiliaryModelConfig,
    EngineConfig,
    RolloutConfig,
)
from asyncrl.config.roles import AgentsConfig, PastConfig
from asyncrl.config.rules import check_settings
from asyncrl.config.running import (
    ENGINE_FRACTION,
    USABLE,
    CheckpointConfig,
    ClusterConfig,
    MetricsConfig,
    RunConfig,
    WeightsConfig,
)
from asyncrl.config.secret_values import Parameters, secrets
from asyncrl.config.tasks import EvalConfig, TaskConfig
from asyncrl.config.training import ModelConfig, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.removed import MOVED_SETTINGS, REMOVED, removal
from asyncrl.settings import Name, Section

__all__ = [
    "AgentsConfig",
    "AlgoConfig",
    "AuxiliaryModelConfig",
    "ClusterConfig",
    "Config",
    "EngineConfig",
    "EvalConfig",
    "PastConfig",
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


class Config(Section):
    """The complete configuration of a run. Sections beside the fields below are those of extensions."""

    model_config = ConfigDict(extra="allow")

    mode: str
    """train: engines generate and trainers train. Extensions have further modes (docs/runs.md); those without engines
    train batches that are given, and those without trainers leave a recording, or evaluate."""
    record: bool
    """Record all groups, and every event that determines the order of the run, in records/ of the run folder."""
    deterministic: bool
    """Bitwise reproducible tokens and weights, also when resumed from a checkpoint: every sample has its own seed, and
    engines process one request at a time on a CPU and use batch-invariant kernels on a GPU. Slow. Requires
    rollout.max_staleness=0, since otherwise timing would decide which weights generate a token
    (docs/runs.md)."""
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
        kinds = lookup.classes(values.get("extensions") or {})
        sections = lookup.sections(kinds)
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
        check_settings(self)
        return self

    @property
    def frozen(self) -> dict[str, AuxiliaryModelConfig]:
        """Return the models that are not trained and have engines of their own, by role: the name of the section."""
        extra = (self.model_extra or {}).items()
        return {name: section for name, section in extra if isinstance(section, AuxiliaryModelConfig)}

    @property
    def own_mode(self) -> extension.OfferedMode | None:
        """Return the extension's mode that the run uses; None for one of the core."""
        return lookup.offered("modes", self.extensions).get(self.mode)

    @property
    def trains(self) -> bool:
        """Return whether trainers run."""
        return self.own_mode is None or self.own_mode.trains

    @property
    def generates(self) -> bool:
        """Return whether engines run."""
        return self.mode == "train" or not self.trains

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
    def keeps_versions(self) -> bool:
        """Return whether engines hold several versions at once. What settings leave to extensions must be resolved."""
        return lookup.keeps_versions(self)

    @property
    def transport(self) -> extension.OfferedTransport | None:
        """Return the extension's transport that the run uses; None for one of the core."""
        return lookup.offered("transports", self.extensions).get(self.weights.transport)

    @property
    def sends_files(self) -> bool:
        """Return whether versions travel as files in weights.folder."""
        return bool(self.transport and self.transport.by_file)

    @property
    def weight_loader(self) -> str | None:
        """Return the custom weight loader that engines need. SGLang accepts only those that it was started with."""
        return self.transport.loader if self.transport else None

    @property
    def recovers(self) -> bool:
        """Return whether trainers and the rollout process are started again when they die."""
        return self.cluster.on_death == "recover" and self.mode == "train" and bool(self.checkpoint.every)

    @property
    def changes_base(self) -> bool:
        """Return whether the engines' policy differs from the model folder before the first step, so that they need
        weights of the trainers first."""
        return self.mode == "train" and lookup.needs_weights(self)

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
    missing environment variable (secret_values.py)."""
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
    """Return the settings of an earlier run, with those that moved in their new sections, and without removed ones that
    it had left unset."""
    found = deepcopy(recorded)
    for removed in REMOVED:
        *above, last = removed.split(".")
        inside: dict[str, Any] = reduce(lambda values, key: values.get(key) or {}, above, found)
        if last in inside and _is_unset(inside[last]):
            del inside[last]
    for old, new in MOVED_SETTINGS.items():
        section, _, field = old.partition(".")
        into, _, name = new.partition(".")
        if not field and section in found:
            found[into] = found.pop(section)
        elif field in (found.get(section) or {}):
            value = found[section].pop(field)
            found.setdefault(into, {}).update({name: value} if name else value)
    return found


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_unset, value.values())))


SPELLING = "check the spelling (asyncrl-train --help all lists every field)."
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
        remedy = removal(prefix + named, value) or REMEDIES.get(item["type"], item["msg"] + ".")
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
