"""What this folder adds: mode=evaluate, its settings, and what the launcher does for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Part, Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses

MODE = "evaluate"
ANSWERS, RESULTS = "answers.jsonl", "results.json"
"""Files of the run folder: what was answered so far, which a resumed run goes on from, and what came of it."""
MERGED = "merged-model"
"""Folder of the model with the adapter in its weights."""


class EvaluateSettings(Section):
    """Evaluation alone (mode=evaluate), of model.path on eval.sets, or on the held-out questions of the tasks without
    any."""

    top_p: Part | None = None
    """Sample from the smallest set of tokens with this probability; unset: from all."""
    top_k: Count | None = None
    """Sample from this many tokens, the most probable ones; unset: from all."""
    adapter: str | None = None
    """PEFT folder of an adapter of model.path, as the hf/ of a run with trainer.lora; it is merged into a copy of the
    model in the run folder."""


def settings_of(config: Config) -> EvaluateSettings:
    """Return the section."""
    section = (config.model_extra or {})[MODE]
    assert isinstance(section, EvaluateSettings)
    return section


def asked(config: Config) -> dict[str, Any]:
    """Return the settings that decide what is asked and how answers are scored."""
    every = json.loads(config.model_dump_json())
    evaluation = {name: every["eval"][name] for name in ("questions", "samples", "temperature")}
    sets = every["eval"]["sets"] or every["tasks"] or {config.task.name: every["task"]}
    answers = {name: every["rollout"][name] for name in ("max_new_tokens", "stop")}
    same = {name: every[name] for name in ("model", MODE, "agent", "agent_params")}
    return {**same, "eval": evaluation, "sets": sets, "rollout": answers, "run": {"seed": every["run"]["seed"]}}


def goes_on(prepared: Preparation) -> bool:
    """Return whether the run goes on from the answers of an earlier one."""
    config = prepared.config
    return config.mode == MODE and config.resume is not None and (prepared.run_dir / ANSWERS).exists()


class EvaluateLaunch(extension.LaunchHooks):
    """The adapter, the answers of a resumed run, and where to look."""

    def refuse(self, prepared: Preparation) -> None:
        """Refuse to go on with answers that were given under other settings."""
        config, file = prepared.config, prepared.run_dir / ANSWERS
        if not goes_on(prepared):
            return
        then, now = json.loads(file.read_text().partition("\n")[0])["settings"], asked(config)
        for name in then.keys() | now.keys():
            if then.get(name) != now.get(name):
                remedy = f"The answers in {file} were given with {then.get(name)}: set that, or another run.dir."
                raise ConfigError(name, now.get(name), remedy)

    def notes(self, prepared: Preparation) -> list[str]:
        """Return the number of answers that there are."""
        if not goes_on(prepared):
            return []
        count = (prepared.run_dir / ANSWERS).read_text().count("\n") - 1  # the first line has the settings
        return [f"{count} questions are answered already"]

    def begins(self, prepared: Preparation) -> None:
        """Merge the adapter. The engines load the result."""
        config = prepared.config
        if config.mode != MODE or not (adapter := settings_of(config).adapter):
            return
        try:
            from asyncrl.extensions.convert.adapters import merge  # imports torch
        except ModuleNotFoundError:
            remedy = "It needs the extension `convert`, which is not installed: give a model folder."
            raise ConfigError("evaluate.adapter", adapter, remedy) from None
        merged = prepared.run_dir / MERGED
        if not merged.exists():
            merge(prepared.folders["model"], Path(adapter).expanduser(), merged, limit=5 << 30)
        prepared.folders["model"] = merged

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield the results."""
        if config.mode == MODE:
            yield "every question", str(run_dir / RESULTS)
            yield "compare", f"asyncrl-inspect {run_dir} OTHER --compare"


class EvaluatePlayer(extension.PlayerHooks):
    """How answers are sampled."""

    def sampling(self, config: Config) -> Mapping[str, Any]:
        """Return what is set."""
        if config.mode != MODE:
            return {}
        settings = settings_of(config)
        return {name: value for name in ("top_p", "top_k") if (value := getattr(settings, name)) is not None}


class Evaluate(extension.Extension):
    """Evaluation alone."""

    Settings = EvaluateSettings
    modes = {MODE: extension.OfferedMode(program="asyncrl.extensions.evaluate.program", continues=True)}  # noqa: RUF012
    trains = False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse settings without an effect, and a run that asks nothing."""
        settings: EvaluateSettings = self.settings
        if config.mode == MODE and not config.eval.questions:
            yield ConfigError("eval.questions", 0, "Nothing would be asked: raise it.")
        for name, value in settings.model_dump().items():
            if value is None:
                continue
            if config.mode != MODE:
                yield ConfigError(f"evaluate.{name}", value, "It applies to mode=evaluate only: remove it.")
            elif name != "adapter" and not config.eval.samples:
                yield ConfigError(f"evaluate.{name}", value, "Greedy answers ignore it: raise eval.samples.")
        if config.mode == MODE and config.resume not in (None, "auto"):
            yield ConfigError("resume", config.resume, "An evaluation goes on in its own folder: set auto.")
        if config.mode == MODE and settings.adapter and config.engine.urls:
            remedy = "Engines that run elsewhere have their own model: start them with the merged one."
            yield ConfigError("evaluate.adapter", settings.adapter, remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return EvaluateLaunch()

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return EvaluatePlayer()


Own = Evaluate
