"""What this folder adds: replay.schedule and replay.compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses


class DebugLaunch(extension.LaunchHooks):
    """The process that repeats a schedule."""

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return what serves the trainers of a replay in place of the rollout process."""
        from asyncrl.launch.plan import rollout_process

        if not (config.mode == "replay" and config.replay.schedule):
            return ()
        return [rollout_process("asyncrl.extensions.debug.schedule_replay", addresses, placement.rollout, run_dir)]


class Debug(extension.Extension):
    """Replay of schedules, and comparison."""

    serves = ("replay.schedule", "replay.compare")
    metrics = {  # noqa: RUF012
        "compare/same": "fraction of trajectories whose tokens equal those of the recorded run",
        "compare/gap": "largest difference in log-probability before the first differing token",
        "compare/others": "number of groups that the recording lacks, or has with another prompt",
    }
    """With replay.compare; over all trajectories so far."""

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return DebugLaunch()

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.debug.compare import GroupComparison

        return GroupComparison()


Own = Debug
