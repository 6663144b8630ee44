"""What this folder adds: mode=evaluate, its settings, and what the launcher does for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import extension, jsonl
from asyncrl.checkpoints import manifest
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Part, Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses

MODE = "evaluate"
ANSWERS, RESULTS = "answers.jsonl", "results.json"
"""Files of the run folder: what was answered so far, which a resumed run goes on from, and what came of it."""
MADE = "merged-model"
"""Folder of the model that the engines load, if it was made of a checkpoint or an adapter."""
MOST_BYTES = 5 << 30
"""Size of a file of it."""


class EvaluateSettings(Section):
    """Evaluation alone (mode=evaluate), of model.path on eval.sets, or on the held-out questions of the tasks without
    any."""

    top_p: Part | None = None
    """Sample from the smallest set of tokens with this probability; unset: from all."""
    top_k: Count | None = None
    """Sample from this many tokens, the most probable ones; unset: from all."""
    adapter: str | None = None
    """PEFT folder of an adapter of model.path, as the hf/ of a run with trainer.lora; it is merged into a copy of the
    model in the run folder. (A checkpoint of a run may be named as model.path itself.)"""


def asked(config: Config) -> dict[str, Any]:
    """Return the settings that decide what is asked and how answers are scored."""
    every = json.loads(config.model_dump_json())
    evaluation = {name: every["eval"][name] for name in ("questions", "samples", "temperature")}
    sets = every["eval"]["sets"] or every["tasks"] or {config.task.name: every["task"]}
    answers = {name: every["rollout"][name] for name in ("max_new_tokens", "stop")}
    same = {name: every[name] for name in ("model", MODE, "agent", "agent_params")}
    return {**same, "eval": evaluation, "sets": sets, "rollout": answers, "run": {"seed": every["run"]["seed"]}}


def earlier(prepared: Preparation) -> list[dict[str, Any]]:
    """Return the lines of answers.jsonl that the run goes on from, of which the first has the settings."""
    config = prepared.config
    return jsonl.Tail(prepared.run_dir / ANSWERS)() if config.mode == MODE and config.resume is not None else []


def checkpoint(config: Config) -> Path | None:
    """Return the checkpoint of a run that model.path names; None if it names something else."""
    folder = Path(config.model.path).expanduser().absolute()
    return folder if config.mode == MODE and (folder / manifest.NAME).is_file() else None


class EvaluateLaunch(extension.LaunchHooks):
    """The model of a checkpoint or adapter, the answers of a resumed run, and where to look."""

    def model(self, config: Config) -> str | None:
        """Return the model of the run that wrote the checkpoint."""
        folder = checkpoint(config)
        return str(manifest.read(folder).config["model"]["path"]) if folder else None

    def refuse(self, prepared: Preparation) -> None:
        """Refuse to go on with answers that were given under other settings."""
        lines, now = earlier(prepared), asked(prepared.config)
        then = lines[0]["settings"] if lines else now
        for name in then.keys() | now.keys():
            if then.get(name) != now.get(name):
                remedy = f"{ANSWERS} in run.dir was written with {then.get(name)}: set that, or another run.dir."
                raise ConfigError(name, now.get(name), remedy)

    def notes(self, prepared: Preparation) -> list[str]:
        """Return the number of answers that there are."""
        lines = earlier(prepared)
        return [f"{len(lines) - 1} questions are answered already"] if lines else []

    def begins(self, prepared: Preparation) -> None:
        """Make the model of a checkpoint or an adapter. The engines load the result."""
        config = prepared.config
        source, adapter = checkpoint(config), (config.model_extra or {})[MODE].adapter
        if config.mode != MODE or not (source or adapter):
            return
        try:
            from asyncrl.extensions.convert.adapters import checkpoint_to_hf, merge  # imports torch
        except ModuleNotFoundError:
            remedy = "It needs the extension `convert`, which is not installed: give a model folder."
            field = "model.path" if source else "evaluate.adapter"
            raise ConfigError(field, str(source or adapter), remedy) from None
        made, base = prepared.run_dir / MADE, prepared.folders["model"]
        if source and not made.exists():  # a resumed run has it
            checkpoint_to_hf(source, made, model=base, dtype=None, limit=MOST_BYTES)
        if adapter and not made.exists():
            merge(base, Path(adapter).expanduser(), made, limit=MOST_BYTES)
        prepared.folders["model"] = made

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield the results."""
        if config.mode == MODE:
            yield "every question", str(run_dir / RESULTS)
            yield "compare", shlex.join(["asyncrl-inspect", str(run_dir), "OTHER", "--compare"])


class EvaluatePlayer(extension.PlayerHooks):
    """How answers are sampled."""

    def sampling(self, config: Config) -> Mapping[str, Any]:
        """Return what is set."""
        settings: EvaluateSettings = (config.model_extra or {})[MODE]
        return settings.model_dump(include={"top_p", "top_k"}, exclude_none=True) if config.mode == MODE else {}


class Evaluate(extension.Extension):
    """Evaluation alone."""

    Settings = EvaluateSettings
    modes = {MODE: extension.OfferedMode(program="asyncrl.extensions.evaluate.program", continues=True)}  # noqa: RUF012
    trains = False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse settings without an effect, and a run that asks nothing."""
        settings: EvaluateSettings = self.settings
        for name, value in settings.model_dump(exclude_none=True).items():
            if config.mode != MODE:
                yield ConfigError(f"evaluate.{name}", value, "It applies to mode=evaluate only: remove it.")
            elif name != "adapter" and not config.eval.samples:
                yield ConfigError(f"evaluate.{name}", value, "Greedy answers ignore it: raise eval.samples.")
        if config.mode != MODE:
            return
        if not config.eval.questions:
            yield ConfigError("eval.questions", 0, "Nothing would be asked: raise it.")
        if config.resume not in (None, "auto"):
            yield ConfigError("resume", config.resume, "An evaluation goes on in its own folder: set auto.")
        source = checkpoint(config)
        if source and settings.adapter:
            remedy = "model.path is a checkpoint, which has all that was trained: remove it, or name the base there."
            yield ConfigError("evaluate.adapter", settings.adapter, remedy)
        if config.engine.urls and (source or settings.adapter):
            remedy = "Engines that run elsewhere have their own model: start them with the merged one."
            yield ConfigError("model.path" if source else "evaluate.adapter", str(source or settings.adapter), remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return EvaluateLaunch()

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return EvaluatePlayer()


Own = Evaluate
