"""What this folder adds: mode=rollout_only, and the process that takes its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses

MODE = "rollout_only"


class CollectLaunch(extension.LaunchHooks):
    """The process in place of the trainers."""

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return it, on the rollout process's machine."""
        from asyncrl.launch.plan import rollout_process

        if config.mode != MODE:
            return ()
        like = rollout_process("asyncrl.extensions.collect.program", addresses, placement.rollout, run_dir)
        return (replace(like, name="collect", ends_the_run=True),)


class Collect(extension.Extension):
    """Recording without training."""

    modes = {MODE: extension.OfferedMode()}  # noqa: RUF012
    trains = False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse a run that leaves nothing, and one that would go on."""
        if config.mode != MODE:
            return
        if not config.record:
            yield ConfigError("record", config.record, f"mode={MODE} produces nothing but a recording: set true.")
        if config.resume is not None:
            yield ConfigError("resume", config.resume, f"mode={MODE} always starts from the beginning: remove it.")

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return CollectLaunch()


Own = Collect
