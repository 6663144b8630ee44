"""What this folder adds: mode=replay, replay.schedule and replay.compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Natural, Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses
    from asyncrl.trainer.batch_source import BatchSource
    from asyncrl.trainer.policy import Policy

MODE = "replay"


class ReplaySettings(Section):
    """Recorded batches that mode=replay trains without engines, and the recording that a run is compared with."""

    source: str | None = Field(default=None, alias="from")
    """Folder of the run whose recording (record=true) is replayed."""
    first: Natural | None = None
    """Number of the first batch; unset: the first available. Training always starts from the weights of model.path."""
    last: Natural | None = None
    """Number of the last batch; unset: the last available."""
    schedule: bool = False
    """Repeat the whole schedule, with recorded answers instead of engines: buffer, admission, staleness and ledger run
    for real and must produce the same batches and the same ledger."""
    loop: Count = 1
    """Number of passes over these batches, each time with their recorded staleness; with first=last, the same batch is
    trained every time."""
    compare: str | None = None
    """With mode=train: folder of a recorded run. Generated groups are compared with the recorded group of the same
    slot, and compare.jsonl reports where tokens and log-probabilities first differ."""
    keep: str | None = None
    """Filter like rollout.accept, as my_module:my_function: groups for which it returns true are trained; unset: all
    groups are."""

    @property
    def folder(self) -> Path:
        """Return the folder of the run to replay."""
        assert self.source is not None, "mode=replay without replay.from is refused"
        return Path(self.source).expanduser()

    @model_validator(mode="after")
    def _in_order(self) -> ReplaySettings:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise ConfigError("replay.last", self.last, f"Must not be before replay.first ({self.first}).")
        for field, value, plain in (("first", self.first, None), ("last", self.last, None), ("keep", self.keep, None)):
            if self.schedule and value is not plain:
                raise ConfigError(f"replay.{field}", value, "replay.schedule repeats the whole run: remove it.")
        if self.schedule and self.loop > 1:
            raise ConfigError("replay.loop", self.loop, "replay.schedule repeats the whole run once: remove it.")
        return self


def settings_of(config: Config) -> ReplaySettings:
    """Return the section of a configuration."""
    found: ReplaySettings = (config.model_extra or {})["replay"]
    return found


class ReplayLaunch(extension.LaunchHooks):
    """The checks of the recording, and the process that repeats a schedule."""

    def follows(self, config: Config) -> Path | None:
        """Return the folder of the recorded run."""
        return settings_of(config).folder if config.mode == MODE else None

    def refuse(self, prepared: Preparation) -> None:
        """Refuse what was not recorded, or with another vocabulary."""
        config, replay = prepared.config, settings_of(prepared.config)
        if config.mode != MODE and not replay.compare:
            return
        from asyncrl.extensions.replay import recorded  # imports pyarrow, which other runs' launchers do without

        recorded.check_recording(replay, replays=config.mode == MODE)
        hf = prepared.hf.get("model", {})
        if config.mode == MODE and "vocab_size" in hf:  # otherwise the model was refused already
            recorded.check_vocabulary(replay, config.model.path, prepared.folders["model"], hf)

    def notes(self, prepared: Preparation) -> list[str]:
        """Return what is replayed."""
        return [f"replays {settings_of(prepared.config).source}"] if prepared.config.mode == MODE else []

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return what serves the trainers of a replay in place of the rollout process."""
        from asyncrl.launch.plan import rollout_process

        if not (config.mode == MODE and settings_of(config).schedule):
            return ()
        return [rollout_process("asyncrl.extensions.replay.schedule_replay", addresses, placement.rollout, run_dir)]


class ReplayTrainer(extension.TrainerHooks):
    """The batches of a rank in mode=replay."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings

    def batches(self, client: Callable[[], BatchSource]) -> BatchSource:
        """Return the recorded batches; with a schedule, as the process that repeats it hands them out."""
        from asyncrl.extensions.replay.source import ReplaySource

        recorded = ReplaySource(self._settings)
        if not self._settings.schedule:
            return recorded
        served = client()
        served.first, served.end = recorded.first, recorded.end
        return served


class Replay(extension.Extension):
    """Replay of recorded batches and of schedules, and comparison."""

    Settings = ReplaySettings
    modes = {MODE: extension.OfferedMode(trains=True)}  # noqa: RUF012
    trains = False
    metrics = {  # noqa: RUF012
        "compare/same": "fraction of trajectories whose tokens equal those of the recorded run",
        "compare/gap": "largest difference in log-probability before the first differing token",
        "compare/others": "number of groups that the recording lacks, or has with another prompt",
    }
    """With replay.compare; over all trajectories so far."""

    @classmethod
    def composed(
        cls, values: dict[str, Any], arguments: Sequence[str], defaults: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the settings of a replay: those of the recorded run, except for what the command line sets."""
        from asyncrl.extensions.replay import recorded

        return recorded.settings(values, arguments, defaults) if values.get("mode") == MODE else values

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Check that a replay has a recording, and starts with it."""
        source = self.settings.source
        if (config.mode == MODE) != (source is not None):
            remedy = "replay.from names the run to replay: set mode=replay and replay.from=FOLDER together."
            yield ConfigError("replay.from", source, remedy)
        if config.resume is not None and self.settings.schedule:
            remedy = "replay.schedule always starts from the beginning: remove this setting."
            yield ConfigError("resume", config.resume, remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return ReplayLaunch()

    def trainer(self, policy: Policy) -> extension.TrainerHooks:
        """Return the hooks on a trainer rank."""
        return ReplayTrainer(self.settings) if policy.config.mode == MODE else extension.TrainerHooks()

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.replay.compare import GroupComparison

        return GroupComparison(self.settings.compare)


Own = Replay
