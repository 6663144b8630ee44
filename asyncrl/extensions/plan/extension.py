"""What this folder adds: plans of runs, and changes of runs in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.launch.cluster import Cluster
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses


class PlanHooks(extension.LaunchHooks):
    """The planner in the launcher. It is imported only where a run asks for it."""

    def plan(self, preparation: Preparation) -> extension.Planned:
        """Choose the settings that cluster.plan leaves open."""
        from asyncrl.extensions.plan.auto_plan import plan_run

        return plan_run(preparation)

    def pilot(
        self, config: Config, run_dir: Path, addresses: Addresses, placement: Placement, cluster: Cluster
    ) -> extension.Pilot:
        """Return the controller of cluster.elastic."""
        from asyncrl.extensions.plan.pilot import ElasticPilot

        return ElasticPilot(config, run_dir, addresses, placement, cluster)


class Plans(extension.Extension):
    """The planner."""

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return PlanHooks()


Own = Plans
