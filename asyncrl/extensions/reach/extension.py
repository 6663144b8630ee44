"""What this folder adds: checks of a run's machines, and of engines that run already, before it starts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation


class ReachLaunch(extension.LaunchHooks):
    """The check in the launcher."""

    def formats(self, prepared: Preparation) -> Mapping[str, tuple[str, str]]:
        """Return the format of engines that run already, of which they tell."""
        from asyncrl.extensions.reach.attached import attached_dtype

        dtype = attached_dtype(prepared.config, prepared.key)
        return {"engine": (dtype, "auto: the engines of engine.urls were started with it")} if dtype else {}

    def refuse(self, prepared: Preparation) -> None:
        """Refuse engines that run already and that this run cannot use."""
        from asyncrl.extensions.reach.attached import check_attached

        check_attached(prepared.config, prepared.key)

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Check the machines, and the network between those of a job."""
        from asyncrl.extensions.reach.machines import check_gpus, check_idle, check_ports
        from asyncrl.extensions.reach.software import check_software
        from asyncrl.extensions.reach.versions import check_versions
        from asyncrl.launch.checks.versions import installed, pinned
        from asyncrl.launch.machine import this_machine
        from asyncrl.launch.placement import ports_wanted

        config, cluster = prepared.chosen.config, prepared.cluster
        yield from check_versions(cluster.machines or [this_machine("", installed())], pinned())
        if not prepared.is_placed:
            return
        if cluster.here:
            yield from check_gpus(cluster.nodes, cluster.machines)
            yield from check_ports(cluster.nodes, ports_wanted(config))
        if not config.cluster.is_local:
            yield from check_idle(cluster.nodes, prepared.placement)
        yield from check_software(prepared)
        if cluster.here and len(cluster.nodes) > 1:
            yield from _checked(prepared)

    def examine(self, prepared: Preparation) -> Iterator[Finding]:
        """Read the questions, if there is a model whose tokenizer counts their tokens."""
        from asyncrl.extensions.reach.question_check import check_questions

        if prepared.config.generates and "model" in prepared.weights:
            yield from check_questions(prepared.config, prepared.folders["model"])


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
