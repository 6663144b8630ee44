"""What this folder adds: checks of a run on several machines before it starts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation


class ReachLaunch(extension.LaunchHooks):
    """The check in the launcher."""

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Check the network between the machines of a job."""
        if len(prepared.cluster.nodes) > 1 and prepared.is_placed:
            yield from _checked(prepared)


def _checked(prepared: Preparation) -> Iterator[Finding]:
    from asyncrl.config import on_gpu
    from asyncrl.errors import LaunchError
    from asyncrl.extensions.reach import network
    from asyncrl.launch.checks.findings import error, failed

    config, placement, cluster = prepared.config, prepared.placement, prepared.cluster
    run_dir = prepared.run_dir
    names = {"model": "model.path", **{role: f"{role}.model" for role in config.frozen}}
    models = {names[role]: folder for role, folder in prepared.folders.items()}
    shared = Path(config.weights.folder).expanduser() if config.weights.folder else run_dir
    nearest = {path: next(one for one in (path, *path.parents) if one.is_dir()) for path in (run_dir, shared)}
    try:
        reach, answers = network.ask_reach(cluster, set(nearest.values()), models.values(), secrets.token_hex(4))
        reached = network.check_reach(reach, answers)
        yield from reached
        named = {str(folder): name for name, folder in models.items()}
        yield from network.check_shared(config, network.unseen(answers), str(nearest[shared]), named)
        machines = {seat.node.name for seat in placement.trainers}
        if len(machines) > 1 and not failed(reached):  # the all-reduce would only run into its timeout
            gpu = on_gpu(config.trainer, max(len(node.gpus) for node in cluster.nodes))
            yield from network.check_allreduce(*network.ask_allreduce(cluster, placement, gpu=gpu))
    except LaunchError as problem:
        yield error("cluster", str(problem), "See what the machines printed.")


class Reachability(extension.Extension):
    """Machines that reach each other."""

    trains = False

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return ReachLaunch()


Own = Reachability
