"""The sbatch script of a run. Pure: the same settings give the same text.

The launcher runs in the batch step and starts everything else with srun. Slurm's warning before the time limit, or
before a preemption, goes to the batch shell (--signal=B:), which forwards it to the launcher as SIGUSR1. The run writes
a checkpoint and exits with PAUSED, and the job is requeued and resumes with resume=auto.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import ClusterConfig
from asyncrl.extensions.slurm.extension import SlurmSettings
from asyncrl.launch.compose import argument
from asyncrl.network.addresses import PAUSED


@dataclass(frozen=True)
class Script:
    """The parameters of a script."""

    name: str
    slurm: SlurmSettings
    cluster: ClusterConfig
    nodes: int  # total over all components
    gpus: int  # per node with GPUs
    folder: Path | None  # working directory of the command; None: where the script is submitted, if it is shipped
    command: str  # asyncrl-train, or its path
    runs: Sequence[tuple[Path, Sequence[str]]]
    """Folder and arguments of the run, or of each run of a sweep, which becomes a job array."""

    @property
    def path(self) -> Path:
        """Return where the script belongs."""
        return self.runs[0][0] / "slurm" / "job.sbatch"

    def text(self) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", f"# {self.name}: made by {self.command} cluster=slurm", *self._header(), ""]
        folder = '"$SLURM_SUBMIT_DIR"' if self.folder is None else shlex.quote(str(self.folder))
        lines += ["set -u", f"cd {folder}", *self.slurm.setup, "", *self._arguments()]
        return "\n".join([*lines, *_RUN.format(paused=PAUSED, requeues=self.slurm.requeues).splitlines(), ""])

    def interactive(self) -> str:
        """Return a script that requests the same machines with salloc and runs in the foreground. Only for a single
        run."""
        ((folder, arguments),) = self.runs
        first, *more = [as_options({**self._lasting(), **part}, "") for part in self._components()]
        options = [*first, *(word for part in more for word in (":", *part))]
        command = shlex.join([self.command, *arguments, argument("run.dir", str(folder))])
        return f"#!/bin/bash\n# {self.name}, in the foreground\nsalloc {shlex.join(options)} {command}\n"

    def _header(self) -> list[str]:
        sweep = len(self.runs) > 1
        number = "%A_%a" if sweep else "%j"
        common = {
            "output": f"%x-{number}.out" if self.folder is None else self.path.parent / f"{number}.out",
            "open-mode": "append",
            "signal": f"B:USR1@{self.cluster.signal_seconds}",
            "requeue" if self.slurm.requeues else "no-requeue": True,
            **({"array": f"0-{len(self.runs) - 1}"} if sweep else {}),
        }
        first, *more = self._components()
        lines = as_options({**self._lasting(), **common, **first})
        return [*lines, *(line for part in more for line in ("#SBATCH hetjob", *as_options(part)))]

    def _lasting(self) -> dict[str, object]:
        """Return the options of a job that sbatch and salloc share."""
        time = {"time": self.slurm.time} if self.slurm.time else {}
        return {"job-name": self.name, **time, "no-kill": True}  # an engine's machine may fail without ending the run

    def _components(self) -> list[dict[str, object]]:
        """Return the options of each component of the job: machines without GPUs form a component of their own, the
        first."""
        given = {name.replace("_", "-"): value for name, value in self.slurm.sbatch.items()}
        cpu_nodes = self.cluster.cpu_nodes
        main = {"nodes": self.nodes - cpu_nodes, "ntasks-per-node": 1}
        main |= {"gpus-per-node": self.gpus} if self.gpus else {}
        plain = {name: value for name, value in given.items() if not name.startswith(("gpu", "gres"))}
        return [*([{"nodes": cpu_nodes, "ntasks-per-node": 1, **plain}] if cpu_nodes else []), {**main, **given}]

    def _arguments(self) -> list[str]:
        resume = ["resume=auto"] if self.slurm.requeues else []
        told = [[*arguments, argument("run.dir", str(folder)), *resume] for folder, arguments in self.runs]
        if len(told) == 1:
            return [f"run=({shlex.join([self.command, *told[0]])})"]
        cases = [f"  {number}) run=({shlex.join([self.command, *one])}) ;;" for number, one in enumerate(told)]
        return ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]


_RUN = """
trap 'kill -USR1 "$launcher" 2>/dev/null' USR1
trap 'kill -TERM "$launcher" 2>/dev/null' TERM INT
"${{run[@]}}" &
launcher=$!
while wait "$launcher"; kill -0 "$launcher" 2>/dev/null; do :; done  # a signal ends wait
wait "$launcher"; code=$?  # its own: that of a wait which a signal ended is the signal's
if [ "$code" -eq {paused} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def as_options(values: Mapping[str, object], before: str = "#SBATCH ") -> list[str]:
    """Return values as options of sbatch, each behind `before`."""
    return [
        f"{before}--{name}" if value is True else f"{before}--{name}={value}"
        for name, value in values.items()
        if value is not False and value is not None
    ]
