"""The machines of a run: this one, or those of a cluster that an extension knows (cluster.launcher)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.config import Config
from asyncrl.launch.checks.versions import installed
from asyncrl.launch.machine import MachineFacts, count_gpus, this_machine, this_node
from asyncrl.launch.placement import Node, ports_wanted
from asyncrl.launch.plan import ProcessSpec
from asyncrl.lookup import offered
from asyncrl.user_code import load

OWN_PORTS = 2
"""Number of ports per machine that are reserved for the preflight: the last ones, which placement does not use."""


class Submission(Protocol):
    """Jobs that are being submitted, while the run goes on."""

    def poll(self) -> str | None:
        """Return what was done once all are submitted, or one has failed; None before."""
        ...

    def cancel(self) -> str:
        """Stop submitting. Return what was done."""
        ...


class EngineJobs(Protocol):
    """Submits jobs of engines that join a run (asyncrl-engines add)."""

    def submit(self, count: int, step: int) -> Submission:
        """Submit jobs, of a machine each, for a decision at this step. Must not block."""
        ...

    def end(self) -> None:
        """Cancel those that have not started."""
        ...


class Cluster:
    """This machine alone. The clusters of extensions override what is different on several machines."""

    job = ""
    """The job that this process belongs to, if it belongs to one."""
    here = True
    """Whether the machines can be used now. Otherwise they are those of a job that has not been submitted."""
    requeues = False
    """Whether the job is started again after a failure, if the run has made progress."""

    def __init__(self, config: Config) -> None:
        """Find the machines of a run with these settings. Raises ConfigError or LaunchError."""
        self.config = config
        self.nodes: Sequence[Node] = ()
        """The machines, once they have been probed."""
        self._machines: Sequence[MachineFacts] = ()

    @classmethod
    def surrounds(cls) -> bool:
        """Return whether this process runs in a job of such a cluster."""
        return False

    @property
    def machines(self) -> Sequence[MachineFacts]:
        """Further facts about the machines, in the same order. Those of this machine are looked up when needed, and
        nothing is known of those of a job that has not been submitted."""
        if self.here and self.nodes and not self._machines:
            self._machines = [this_machine("", installed())]
        return self._machines

    def probe(self, config: Config, ports: int | None = None) -> None:
        """Look at each machine, and reserve this many ports there; by default as many as the run needs. `config` may
        have changed since the beginning (LaunchHooks.plan). For a job that has not been submitted, `nodes` become
        placeholders (placement.imagined). Raises ConfigError or LaunchError."""
        cluster = config.cluster
        gpus = count_gpus(cluster.gpus)
        self.nodes = [this_node(cluster.host, cluster.interface, gpus, ports or ports_wanted(config))]

    def everywhere(
        self, program: list[str], seconds: float, nodes: Sequence[str] | None = None, mounts: Sequence[Path] = ()
    ) -> list[str]:
        """Run a program once on every machine, or on these, concurrently. Return its output. It is ended after so many
        seconds, besides those that starting it there may take. In the environment, NODE (network/addresses.py) names
        its machine, if there are several. Containers get the folders `mounts`. Raises LaunchError."""
        try:
            done = subprocess.run(
                program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return [str(late.stdout or "")]
        return [done.stdout]

    def steps(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        run_id: str,
        mounts: Sequence[Path],
        lease: Path,
        orphaned: Sequence[str],
    ) -> list[ProcessSpec]:
        """Return the processes as what this machine starts for them: programs that start them on their machines, and
        end with them. They watch the launcher's `lease`; when it expires, one of them runs the command `orphaned`."""
        return list(specs)

    def restart(self) -> list[str]:
        """Return the command that starts the job again, or ends it if it was started often enough."""
        return []

    def cancellation(self) -> list[str]:
        """Return the command that ends the job."""
        return []

    def has(self, node: str) -> bool:
        """Return whether a machine still belongs to the job. True if that is not known: it is asked again."""
        return True

    def end_steps(self, run_id: str) -> None:
        """End what a launcher that was stopped in a hurry left on other machines."""

    def submit(self, runs: Sequence[tuple[Path, Sequence[str]]]) -> str:
        """Submit runs, each a folder and its arguments, as a job. Return the message for the user. Only called where
        `here` is false. Raises ConfigError or LaunchError."""
        raise NotImplementedError

    def engine_jobs(self, run_dir: Path, gpus: int, command: Sequence[str]) -> EngineJobs | None:
        """Return what submits jobs of engines, which join the run by `command`; None if there are none, and engines
        join on this machine."""
        return None


def cluster_of(config: Config) -> Cluster:
    """Return the machines that cluster.launcher names. Raises ConfigError or LaunchError."""
    path = offered("clusters", config.extensions).get(config.cluster.launcher)
    kind: type[Cluster] = load(path, "cluster.launcher") if path else Cluster
    return kind(config)
