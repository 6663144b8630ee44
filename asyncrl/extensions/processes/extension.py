"""What this folder adds: processes that play the episodes of a run, instead of the rollout process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.settings import Count, Section

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.launch.placement import Placement, Seat
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses
    from asyncrl.rollout.parts import PlaysEpisodes
    from asyncrl.rollout.reporters import RolloutRun


class ProcessesSettings(Section):
    """Processes that play episodes (asyncrl/extensions/processes/README.md)."""

    count: Count = 1
    """Number of processes that play episodes. 1: the rollout process does it itself. With more of them, it keeps buffer
    and ledger, and each of the others holds connections, agents, environments and rewards for its share of the groups;
    limits of concurrency of environments and teacher then apply to each of them. Each is restarted up to
    cluster.max_restarts times."""


class ProcessesLaunch(extension.LaunchHooks):
    """Where the processes are, and how they are started."""

    def __init__(self, count: int) -> None:
        self._count = count

    def ports(self) -> int:
        """One, at which the rollout process listens for them."""
        return int(self._count > 1)

    def shared(self, ports: Sequence[Seat]) -> dict[str, str]:
        """Where that is."""
        return {"url": ports[0].url} if ports else {}

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return the processes, round-robin over the rollout process's machine and those of the engines."""
        from asyncrl.launch.plan import rollout_process

        if self._count == 1 or not config.generates:
            return ()
        module, hosts = "asyncrl.extensions.processes.episodes", placement.hosts
        like = [
            rollout_process(module, addresses, hosts[number % len(hosts)], run_dir) for number in range(self._count)
        ]
        return [
            replace(
                spec,
                name=f"episodes-{number}",
                argv=[*spec.argv, str(number)],
                restarts=config.cluster.max_restarts,
                reports=True,
            )
            for number, spec in enumerate(like)
        ]


class ProcessesRollout(extension.RolloutHooks):
    """What plays the episodes, for everything else in the rollout process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def plays(self, run: RolloutRun) -> PlaysEpisodes | None:
        """Return the processes; None if this process plays itself."""
        from asyncrl.extensions.processes.workers import EpisodeWorkers

        return EpisodeWorkers(run, self._count) if self._count > 1 else None


class Processes(extension.Extension):
    """Several processes that play."""

    Settings = ProcessesSettings
    metrics = {  # noqa: RUF012
        "processes/playing": "number of processes that play episodes, without those that are being restarted",
        "processes/episodes/most": "number of running episodes of the process that had most of them",
        "processes/lost": "number of processes that were lost since the start of the run; each is restarted",
        "processes/replayed": "number of groups that were played anew for that reason since the start of the run",
    }
    """With processes.count above 1; as they were when the batch was taken."""
    trains = False

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return ProcessesLaunch(self.settings.count)

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        return ProcessesRollout(self.settings.count)


Own = Processes
