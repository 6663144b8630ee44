"""Builds the tasks that a configuration names."""

from __future__ import annotations

from asyncrl import lookup
from asyncrl.config import Config, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Task
from asyncrl.tasks.custom import custom_task
from asyncrl.user_code import load

KINDS = {
    "copy": "asyncrl.tasks.copy_digits:CopyDigits",
    "file": "asyncrl.tasks.files:FileTask",
}
"""Task classes by task.kind, beside those of extensions; each is created with the task's configuration."""


def build(config: TaskConfig) -> Task:
    """Build the task that a configuration names, as extensions wrap it: with its images and its tools."""
    task = _plain(config)
    for field in ("image_key", "tools"):
        if getattr(config, field):
            task = lookup.wrapped(task, config, field)
    return task


def _plain(config: TaskConfig) -> Task:
    kinds = KINDS | lookup.offered("tasks")
    if config.kind in kinds:
        task: Task = load(kinds[config.kind], "task.kind")(config)
        return task
    if ":" in config.kind:
        return custom_task(config.kind, config.params)
    raise ConfigError("task.kind", config.kind, f"Must be one of {sorted(kinds)}, or an import path, module:name.")


def build_all(config: Config) -> dict[str, Task]:
    """Build every task and evaluation set of a run, by name. A ConfigError names the field of the set that it is
    about."""
    built = {}
    for name, section in (config.mixture | config.eval_sets).items():
        try:
            built[name] = build(section)
        except ConfigError as error:
            field = error.field.replace("task.", f"{config.field_of(name)}.")
            raise ConfigError(field, error.value, error.remedy) from None
    return built
