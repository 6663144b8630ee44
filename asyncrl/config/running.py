"""The run itself: its ends, its weights on their way, its machines and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from asyncrl.config.section import Count, Natural, Positive, Section
from asyncrl.errors import ConfigError


class Run(Section):
    """What this run is, where it writes, and when it ends."""

    name: str
    """Name of the run; part of the default folder."""
    dir: str
    """Run folder. Must be new or empty, unless `run.overwrite` is set."""
    overwrite: bool
    """Empty an existing run folder first (only a folder of a run, in which nothing lies that this one reads)."""
    seed: Natural
    """Seed of the prompt order, of tiny models and of Megatron."""
    max_steps: Count
    """Stop after this many batches."""
    token_budget: Count | None
    """Stop once this many tokens have been generated for training."""
    reward_target: float | None
    """Stop once the mean reward over `run.reward_window` steps reaches this."""
    reward_window: Count
    """Steps over which rewards are averaged, in the stop rule and in the summary."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Run:
        for field in ("name", "dir"):
            value = getattr(self, field)
            if not value.strip() or not value.isprintable():
                raise ConfigError(f"run.{field}", value, "Must be a name without line breaks and control characters.")
        return self


class Checkpoint(Section):
    """Checkpoints of the whole run, in checkpoints/ of the run folder: see docs/checkpoints.md."""

    every: Count | None
    """Write one every so many versions, and at the end; unset: none."""
    keep_last: Count
    """How many of the newest stay."""
    keep_every: Count | None
    """Those of versions that this divides stay for ever; unset: none do."""
    timeout: Positive
    """Seconds that writing one may take, beside training."""


class Replay(Section):
    """Which recorded batches mode=replay trains, without engines; and what a run is compared with."""

    source: str | None = Field(alias="from")
    """Folder of the run whose recording (record=true) is replayed."""
    first: Natural | None
    """Number of the first batch; unset: the first that there is. Weights are those of model.path, whatever it is."""
    last: Natural | None
    """Number of the last batch; unset: the last that there is."""
    schedule: bool
    """Do the whole schedule again, with the recorded answers in the place of engines: buffer, admission, staleness and
    ledger run for real, and must come to the same batches and books."""
    loop: Count
    """Train these batches so many times over, as if each time were at its own age: with first=last, one batch."""
    compare: str | None
    """With mode=train: folder of a recorded run. What is generated is compared with the group of the same slot there,
    and compare.jsonl tells where tokens and log-probabilities first differ."""
    keep: str | None
    """A function like rollout.accept, as my_module:my_function: groups for which it gives true are trained; unset: all
    are."""

    @property
    def folder(self) -> Path:
        """That of the run to replay."""
        assert self.source is not None, "mode=replay without replay.from is refused"
        return Path(self.source).expanduser()

    @model_validator(mode="after")
    def _in_order(self) -> Replay:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise ConfigError("replay.last", self.last, f"Must not lie before replay.first ({self.first}).")
        for field, value, plain in (("first", self.first, None), ("last", self.last, None), ("keep", self.keep, None)):
            if self.schedule and value is not plain:
                raise ConfigError(f"replay.{field}", value, "replay.schedule does everything again: leave it out.")
        if self.schedule and self.loop > 1:
            raise ConfigError("replay.loop", self.loop, "replay.schedule does everything again, once: leave it out.")
        return self


class Weights(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "tensor", "distributed", "disk", "delta"]
    """tensor: shared memory or CUDA IPC on one host; distributed: gloo or NCCL broadcast; disk: files on a file system
    that engines share; delta: such files with only what changed; auto picks one of the first two and says why."""
    staging: Literal["full", "stream"]
    """full: every bucket is filled before the pause, which is then the shortest, in memory for all weights of a stage;
    stream: two buckets, filled and sent in turn during the pause. Disk and delta write before the pause, from two."""
    bucket_mb: Count
    """Size of a bucket in MiB; a larger tensor travels alone."""
    pause_mode: Literal["in_place", "retract", "abort", "drain"]
    """What an update does to requests in flight. in_place: freeze, and go on with the KV cache they have; retract:
    prefill them anew under the new weights; abort: return them unfinished, to be continued as new requests; drain: wait
    until they are answered, while no new one starts (slow: to compare with)."""
    verify: bool
    """Compare the engines' checksums with those of the weights sent, at the first publish and when an engine joins.
    Off for engines that quantize: what they hold is not what was sent."""
    verify_every: Count | None
    """Compare them every so many versions, too; unset: only then."""
    folder: str | None
    """Where disk and delta write, on a file system that all engines see; unset: weights/ in the run folder."""
    timeout: Positive
    """Seconds that any one call of a publish may take. An engine that does not answer for as long between publishes
    hangs: it is killed, and then it died."""


class Container(Section):
    """An image that the run's processes start in, but for the launcher: docs/slurm.md."""

    kind: Literal["none", "pyxis", "apptainer"]
    """pyxis: Slurm's own, by enroot; apptainer: also singularity."""
    image: str | None
    """As the kind names it: a registry's image, or a file."""
    mounts: list[str]
    """Folders of the nodes, as FROM:TO, beside the folder of the command, run.dir and the model's."""
    python: str
    """Python in the image, with asyncrl installed."""

    @model_validator(mode="after")
    def _has_an_image(self) -> Container:
        if self.kind != "none" and not self.image:
            raise ConfigError("cluster.container.image", None, f"cluster.container.kind={self.kind} needs one.")
        return self


class Cluster(Section):
    """Machines, addresses and how to end."""

    launcher: Literal["local", "slurm"]
    """local: all on this machine; slurm: as a job, or inside of one (docs/slurm.md)."""
    nodes: Count | None
    """Machines of the job; unset: as many as the ranks need."""
    trainer_nodes: Count | None
    """The first so many are the trainers' alone; unset: engines take what trainers leave."""
    cpu_nodes: Natural
    """Machines without GPUs among them, for router and rollouts: a part of the job of their own, the first."""
    submit: bool
    """Hand the job to Slurm; else only write its script, and print where it lies."""
    time: str | Count | None
    """Its limit, as Slurm writes it (1-00:00:00), or in minutes; unset: the partition's."""
    signal_seconds: Count
    """Seconds before the limit, or before it is preempted, at which it writes a checkpoint and is queued again."""
    requeues: Natural
    """How often it is queued again, for that or because a machine failed; above 0 needs checkpoint.every."""
    sbatch: dict[str, Any]
    """Further options of sbatch, by name: partition, account, qos, mem, exclusive: true, ..."""
    setup: list[str]
    """Lines of its script before the command: module load, source, export."""
    srun: list[str]
    """Further options of every srun."""
    container: Container
    host: str | None
    """Address that every server binds to; unset: each machine's own on `cluster.interface`."""
    interface: str | None
    """Network interface of those addresses (eth0, ib0); unset: that of the route to other machines."""
    tls: bool
    """Every server of the run shows a certificate that the run has signed, and connections are encrypted: nobody else
    on its machines, or between them, can read the run's key or stand in for one of its servers. false, for machines
    that nobody else uses, makes a request cheaper (docs/security.md)."""
    gpus: Natural | None
    """GPUs to use of each machine; unset: those that it has. A job that is submitted must be told."""
    start_timeout: Positive
    """Seconds that the machines of a job may take to answer at first."""
    lost_timeout: Positive
    """Seconds without a sign of life of the launcher, whose machine may have failed, after which a job's processes end
    and the job is queued again, or cancelled where `requeues` are used up."""
    stall_timeout: Positive | None
    """Seconds for which the rollout process or a trainer rank may make no progress: spend in one micro-batch, or give
    no sign of life. Then the run ends, and RUN/logs/NAME.stack shows what each of them was doing. Must exceed the
    longest micro-batch; unset, nobody checks."""
    preflight: bool
    """Look at versions, model files, memory, folders and network before anything is started, and start nothing where
    the run would fail (docs/slurm.md). --check does it alone, wherever it is given."""
    on_engine_death: Literal["restart", "fail"]
    """What the death of an engine or of the router, or that it hangs, means for a run that is under way: start it again
    (an engine gets all weights, and serves once its checksum is confirmed), or end the run."""
    max_restarts: Natural
    """How often any one of them is started again; the next death ends the run."""
    stop_grace: Positive
    """Seconds between asking a process to stop and killing it."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Cluster:
        if self.host is not None and (self.host in ("0.0.0.0", "::", "*") or not self.host.strip()):
            remedy = "Must be one address, which others can ask: leave it unset, or name that of an interface."
            raise ConfigError("cluster.host", self.host, remedy)
        return self

    @model_validator(mode="after")
    def _fits_its_launcher(self) -> Cluster:
        if self.launcher == "local":
            for field, value, plain in (
                ("nodes", self.nodes, None),
                ("trainer_nodes", self.trainer_nodes, None),
                ("cpu_nodes", self.cpu_nodes, 0),
                ("requeues", self.requeues, 0),
            ):
                if value != plain:
                    raise ConfigError(f"cluster.{field}", value, "Is of jobs: set cluster=slurm, or leave it out.")
        return self


class Metrics(Section):
    """Where figures go besides metrics.jsonl and summary.json, which are always written."""

    console: bool
    """A line per step in the terminal."""
    tensorboard: bool
    """Event files in tb/."""
