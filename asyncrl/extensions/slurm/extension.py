"""What this folder adds: a cluster, whose jobs are Slurm's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from asyncrl import extension
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Natural, Positive, Section

OURS = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "output",
    "open-mode",
    "signal",
    "requeue",
    "no-requeue",
    "no-kill",
    "time",
    "array",
}
"""sbatch options that are derived from the run."""


class Container(Section):
    """Container image for all processes of the run except the launcher."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis: Slurm's own container support, based on enroot; apptainer: also singularity."""
    image: str | None = None
    """Image in the notation of that kind: a registry image, or a file."""
    mounts: list[str] = Field(default_factory=list)
    """Additional mounts of node folders, as FROM:TO; the working directory, run.dir and the model folders are always
    mounted."""
    python: str = "python3"
    """Python interpreter in the image, with asyncrl installed."""


class SlurmSettings(Section):
    """A run as a Slurm job, with cluster=slurm."""

    submit: bool = True
    """Submit the job to Slurm; otherwise only write its script and print the path."""
    time: str | Count | None = None
    """Time limit of the job, in Slurm's notation (1-00:00:00) or in minutes; unset: the partition's default."""
    requeues: Natural = 0
    """Maximum number of requeues, after the time limit, a preemption or a machine failure; above 0 requires
    checkpoint.every."""
    sbatch: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options, by name: partition, account, qos, mem, exclusive: true, ..."""
    setup: list[str] = Field(default_factory=list)
    """Lines of the job script before the command: module load, source, export."""
    srun: list[str] = Field(default_factory=list)
    """Additional options of every srun."""
    container: Container = Container()
    start_timeout: Positive = 120.0
    """Timeout for the first response of a job's machines, in seconds."""
    lost_timeout: Positive = 180.0
    """Seconds without a heartbeat of the launcher, whose machine may have failed, after which the processes of a job
    exit and the job is requeued, or cancelled if `requeues` are used up."""


def settings_of(config: Config) -> SlurmSettings:
    """Return the section."""
    settings: SlurmSettings = (config.model_extra or {})["slurm"]
    return settings


class Slurm(extension.Extension):
    """Jobs of Slurm."""

    Settings = SlurmSettings
    clusters = {"slurm": "asyncrl.extensions.slurm.job:SlurmJob"}  # noqa: RUF012
    trains = False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Check the section."""
        slurm: SlurmSettings = self.settings
        if slurm.requeues and config.cluster.launcher != "slurm":
            yield ConfigError("slurm.requeues", slurm.requeues, "Only Slurm jobs have it: set cluster=slurm.")
        if slurm.requeues and not config.checkpoint.every:
            remedy = "A requeued job resumes from a checkpoint: set checkpoint.every."
            yield ConfigError("slurm.requeues", slurm.requeues, remedy)
        if slurm.container.kind != "none" and not slurm.container.image:
            yield ConfigError("slurm.container.image", None, f"slurm.container.kind={slurm.container.kind} needs one.")
        for option in slurm.sbatch:
            if option.replace("_", "-") in OURS:
                remedy = "asyncrl derives this option from the run and the other settings: remove it."
                yield ConfigError(f"slurm.sbatch.{option}", slurm.sbatch[option], remedy)


Own = Slurm
