"""What this folder adds: places beside the run folder to which metrics, evaluations and sampled episodes are sent."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from asyncrl import extension
from asyncrl.config.secret_values import Parameters, Secret
from asyncrl.errors import ConfigError
from asyncrl.settings import Natural, Section
from asyncrl.user_code import can_import

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation

SINKS = ("tensorboard", "wandb", "mlflow")


class SinkSettings(Section):
    """Where metrics are sent besides the files of the run folder (asyncrl/extensions/sinks/README.md)."""

    names: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default=["tensorboard"])
    """Where the metrics of each step, held-out accuracies and sampled episodes are also sent. tensorboard: event files
    in tb/; wandb: Weights & Biases; mlflow: a tracking server, or a folder."""
    episodes: Natural = 4
    """Number of episodes of each batch, chosen at random, whose texts the sinks receive."""
    wandb: Parameters = Field(default_factory=lambda: {"project": "asyncrl"})
    """Arguments of wandb.init, such as project, entity, tags and mode=offline, and api_key; unset: the environment
    variable WANDB_API_KEY."""
    mlflow: Parameters = Field(default_factory=lambda: {"experiment": "asyncrl"})
    """experiment: name of the experiment; tracking_uri: address of the server; unset: the environment variable
    MLFLOW_TRACKING_URI, or mlruns/ in the run folder. Credentials are MLflow's environment variables."""

    @model_validator(mode="after")
    def _keys_are_secret(self) -> SinkSettings:
        for sink in SINKS[1:]:
            for name, value in getattr(self, sink).items():
                if name in ("api_key", "token", "password") and not isinstance(value, Secret):
                    remedy = "It would be written to config.json: export it as a variable, and set ${oc.env:VARIABLE}."
                    raise ConfigError(f"sinks.{sink}.{name}", "a plain text", remedy)
        return self

    @model_validator(mode="after")
    def _sinks_are_on(self) -> SinkSettings:
        for sink in SINKS[1:]:
            for name, value in getattr(self, sink).items() if sink not in self.names else ():
                if value != "asyncrl":  # the defaults
                    remedy = f"Nothing is sent to {sink}: add it to sinks.names, or remove this."
                    raise ConfigError(f"sinks.{sink}.{name}", value, remedy)
        return self


class SinkLaunch(extension.LaunchHooks):
    """What the launcher checks and says of the sinks."""

    def __init__(self, settings: SinkSettings) -> None:
        self._names, self._wandb = settings.names, settings.wandb

    def check_packages(self) -> None:
        """Refuse sinks whose package is not installed. Raises ConfigError."""
        for name in self._names:
            if not can_import(name):
                remedy = f"The package {name} is not installed: pip install 'asyncrl[sinks]' or remove it."
                raise ConfigError("sinks.names", name, remedy)

    def refuse(self, prepared: Preparation) -> None:
        """Refuse sinks whose package is not installed."""
        self.check_packages()

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Report wandb without a key."""
        from asyncrl.launch.checks.findings import warning

        if "wandb" in self._names and not self.has_key():
            remedy = "Export WANDB_API_KEY, or set +sinks.wandb.mode=offline; otherwise nothing is sent."
            yield warning("sinks.names", "wandb finds no key on this machine", remedy)

    def has_key(self) -> bool:
        """Return whether wandb finds a key on this machine, or needs none."""
        local = {"offline", "disabled", "dryrun"} & {self._wandb.get("mode"), os.environ.get("WANDB_MODE")}
        given = self._wandb.get("api_key") or os.environ.get("WANDB_API_KEY")
        return bool(local or given or Path(os.environ.get("NETRC", "~/.netrc")).expanduser().exists())

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield the commands that show the curves."""
        if "tensorboard" in self._names:
            yield "curves", shlex.join(["tensorboard", "--logdir", f"{run_dir}/tb"])
        if "mlflow" in self._names and (run_dir / "mlruns").exists():
            yield "curves", shlex.join(["mlflow", "ui", "--backend-store-uri", f"{run_dir}/mlruns"])


class SinkExtension(extension.Extension):
    """Metrics are sent to sinks."""

    Settings = SinkSettings
    trains = False

    def launch(self) -> SinkLaunch:
        """Return the hooks in the launcher."""
        return SinkLaunch(self.settings)

    def steps(
        self, config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None
    ) -> extension.StepListener | None:
        """Return what sends each step to the sinks."""
        from asyncrl.extensions.sinks.sinks import Sinks

        return Sinks(config, self.settings, run_dir, model, warn, first) if self.settings.names else None


Own = SinkExtension
