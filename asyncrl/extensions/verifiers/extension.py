"""What this folder adds: a kind of task, metrics of its episodes, and the comparison of its tasks in a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl import extension, jsonl
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses

FILE = "verifiers.json"
"""File of the run folder with the keys of the tasks, by the name of the task or evaluation set."""


class VerifiersLaunch(extension.LaunchHooks):
    """Compares the tasks of a resumed run with those that it began with."""

    def refuse(self, prepared: Preparation) -> None:
        """Refuse other tasks."""
        compare(prepared)

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Warn if nothing can be compared."""
        from asyncrl.launch.checks.findings import warning

        if prepared.origin and keys(prepared) and before(prepared) is None:
            remedy = "The checkpoint lies outside of its run: make sure that the environment's tasks are the same."
            yield warning("task.name", f"no {FILE} beside the checkpoint", remedy)

    def begins(self, prepared: Preparation) -> None:
        """Keep the keys for a resume."""
        if now := keys(prepared):
            jsonl.replace(prepared.run_dir / FILE, now)


def keys(prepared: Preparation) -> dict[str, list[str]]:
    """Return the keys of the tasks of this run, by the name of the task or evaluation set."""
    from asyncrl.extensions.verifiers.task import Verifiers

    built = [one for one in prepared.announced if isinstance(one, Verifiers)]
    sections = prepared.config.mixture | prepared.config.eval_sets
    return {name: one.keys for name, section in sections.items() for one in built if one.section == section}


def before(prepared: Preparation) -> dict[str, list[str]] | None:
    """Return the keys of the run that is resumed; None if they are not to be found."""
    folder = prepared.origin.run_dir if prepared.origin else None
    if folder is None or not (folder / FILE).exists():
        return None
    return jsonl.read_object(folder / FILE)


def compare(prepared: Preparation) -> None:
    """Raise ConfigError if a task of the run that is resumed has another key now, which names the first."""
    then = before(prepared) or {}
    for name, now in keys(prepared).items():
        for number, (old, new) in enumerate(zip(then.get(name, now), now, strict=False)):
            if old != new:
                remedy = f"Task {number} of {name} had the key {old}: resume with that version, or start a new run."
                raise ConfigError(f"{prepared.config.field_of(name)}.name", new, remedy)
        if len(then.get(name, now)) != len(now):
            remedy = f"{name} had {len(then[name])} tasks: resume with those (task.params), or start a new run."
            raise ConfigError(f"{prepared.config.field_of(name)}.name", len(now), remedy)


class VerifiersPlayer(extension.PlayerHooks):
    """Metrics of the episodes that this process plays."""

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return what was counted since the last call."""
        from asyncrl.extensions.verifiers.task import FIGURES

        return FIGURES.take()


class VerifiersTasks(extension.Extension):
    """Environments of verifiers."""

    tasks = {"verifiers": "asyncrl.extensions.verifiers.task:Verifiers"}  # noqa: RUF012

    metrics = {"episodes/metric/<metric>": "mean of the rubric's metric over the episodes since the previous step"}  # noqa: RUF012

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Yield what is set although the environment decides it."""
        sections = config.mixture | config.eval_sets
        if any(section.kind == "verifiers" for section in sections.values()):
            from asyncrl.extensions.verifiers.task import decided_elsewhere

            for name, section in sections.items():
                if section.kind == "verifiers":
                    yield from decided_elsewhere(config.field_of(name), section)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return VerifiersLaunch()

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        used = any(section.kind == "verifiers" for section in (config.mixture | config.eval_sets).values())
        return VerifiersPlayer() if used else extension.PlayerHooks()


Own = VerifiersTasks
