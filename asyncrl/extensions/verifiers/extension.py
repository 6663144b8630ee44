"""What this folder adds: a kind of task, metrics of its episodes, and the comparison of its tasks in a resumed run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import fsum
from typing import TYPE_CHECKING, Any

from asyncrl import extension, jsonl
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses

KIND = "verifiers"
FILE = "verifiers.json"
"""File of the run folder with the keys of the tasks, by the name of the task or evaluation set."""
FIGURES: defaultdict[str, list[float]] = defaultdict(list)
"""What the episodes of this process were rewarded for, and what else was measured in them, by the metric's name."""
DECIDED: dict[str, Any] = {"agent": None, "agent_params": {}, "system": None, "shots": 0, "tools": [], "reward": None}
"""Settings of a task that the environment decides itself, as they are where nobody sets them."""


class VerifiersLaunch(extension.LaunchHooks):
    """Compares the tasks of a resumed run with those that it began with, by their keys."""

    def refuse(self, prepared: Preparation) -> None:
        """Refuse other tasks than those of the run that is resumed, and name the first."""
        then = before(prepared) or {}
        for name, now in keys(prepared).items():
            old, field = then.get(name, now), f"{prepared.config.field_of(name)}.name"
            for number, (one, other) in enumerate(zip(old, now, strict=False)):
                if one != other:
                    remedy = f"Task {number} of {name} had the key {one}: resume with that version, or start a new run."
                    raise ConfigError(field, other, remedy)
            if len(old) != len(now):
                remedy = f"{name} had {len(old)} tasks: resume with those (task.params), or start a new run."
                raise ConfigError(field, len(now), remedy)

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
    return jsonl.read_object(folder / FILE) if folder else None


class VerifiersPlayer(extension.PlayerHooks):
    """Metrics of the episodes that this process plays."""

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return sums and counts since the last call."""
        found = {name: (fsum(values), float(len(values))) for name, values in sorted(FIGURES.items())}
        FIGURES.clear()
        return found


class VerifiersTasks(extension.Extension):
    """Environments of verifiers."""

    tasks = {KIND: "asyncrl.extensions.verifiers.task:Verifiers"}  # noqa: RUF012

    metrics = {"episodes/metric/<metric>": "mean of the rubric's metric over the episodes since the previous step"}  # noqa: RUF012

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Yield what is set although the environment decides it."""
        for name, section in (config.mixture | config.eval_sets).items():
            for setting, unset in DECIDED.items() if section.kind == KIND else ():
                if (value := getattr(section, setting)) != unset:
                    remedy = "Remove it: the environment decides it itself (task.params.args)."
                    yield ConfigError(f"{config.field_of(name)}.{setting}", value, remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return VerifiersLaunch()

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return VerifiersPlayer()


Own = VerifiersTasks
