"""Configuration of the run itself: stop conditions, checkpoints, weight transport, cluster and metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Natural, Positive, Section


class RunConfig(Section):
    """Name, output folder and stop conditions of the run."""

    name: str
    """Name of the run; part of the default folder."""
    dir: str
    """Run folder. Must be new or empty, unless `run.overwrite` is set."""
    overwrite: bool
    """Empty an existing run folder first. Only applies to the folder of a run that contains none of this run's
    inputs."""
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
    def _has_a_place(self) -> RunConfig:
        for field in ("name", "dir"):
            value = getattr(self, field)
            if not value.strip() or not value.isprintable():
                raise ConfigError(f"run.{field}", value, "Must be a name without line breaks and control characters.")
        return self


class CheckpointConfig(Section):
    """Checkpoints of the whole run, in checkpoints/ of the run folder: see docs/runs.md."""

    every: Count | None
    """Write a checkpoint every this many versions, and at the end; unset: none."""
    keep_last: Count
    """Number of newest checkpoints to keep."""
    keep_every: Count | None
    """Keep checkpoints of versions divisible by this permanently; unset: none."""
    timeout: Positive
    """Timeout for writing one checkpoint in the background, in seconds."""


TRANSPORTS = ("auto", "tensor", "distributed")
"""Values of weights.transport, beside those of extensions."""


class WeightsConfig(Section):
    """Transport of new weights to the engines."""

    transport: str
    """tensor: shared memory or CUDA IPC on one host; distributed: gloo or NCCL broadcast; disk: files on a file system
    that the engines share; auto: picks tensor or distributed and reports why; or the name of an extension's transport
    (docs/extensions.md)."""
    lora: Literal["auto", "versions", "merged"]
    """How the weights of a run with trainer.lora reach the engines. versions: each version as an adapter of its own,
    which is loaded beside the older ones without a pause; every completion then has exactly one version. merged: as
    full weights, with the adapter added to the base. auto: versions on GPUs, merged on CPUs, where adapters slow
    generation down; also merged where engines cannot serve the adapters."""
    staging: Literal["auto", "full", "stream"]
    """full: every bucket is filled before the pause, which is then shortest, but takes memory for all weights of a
    stage; stream: two buckets are filled and sent alternately during the pause. disk writes before the pause, from
    two buckets. auto: stream if the trainer runs on GPUs, of which one rarely has room for all weights of its
    stage; otherwise full. With overlap auto is full."""
    overlap: bool
    """Publish a version in the background, while the trainer trains the next batch (docs/weights.md). It takes memory
    for all weights of a stage, and requires a rollout.lead of at least 1."""
    bucket_mb: Count
    """Size of a bucket in MiB; a larger tensor gets a bucket of its own."""
    pause_mode: Literal["in_place", "retract", "abort", "drain"]
    """Effect of a weight update on requests in flight. in_place: pause them and continue with their existing KV cache;
    retract: prefill them again under the new weights; abort: return them unfinished, to be continued as new requests;
    drain: wait until they have finished, while no new ones start (slow; a baseline for comparison)."""
    verify: bool
    """Compare the engines' checksums with those of the weights sent, at the first publish and when an engine joins.
    Disable it for engines that quantize by themselves, since they hold different values from those sent."""
    verify_every: Count | None
    """Also compare the checksums every this many versions; unset: only in those two cases."""
    folder: str | None
    """Folder that transports by file and lora=versions write to, on a file system that all engines see; unset: weights/
    in the run folder."""
    timeout: Positive
    """Timeout of any single call of a publish, in seconds. An engine that does not answer for this long between
    publishes is considered hung: it is killed and treated as dead."""


ENGINE_FRACTION, USABLE = 0.4, 0.9
"""With cluster.placement=shared: an engine's part of a GPU's memory, where none is set, and that of engine and trainer
together. The rest is for two CUDA contexts, the buffers of NCCL, and the engine's CUDA graphs and activations."""


class ClusterConfig(Section):
    """Machines, addresses, supervision and shutdown."""

    placement: str
    """separate: trainers and engines have GPUs of their own and work at the same time. shared: they work at the same
    time on the same GPUs, each with a part of the memory (engine.memory_fraction); without GPUs it is like separate.
    Others are those of extensions, which use the same GPUs in other ways (docs/parallelism.md)."""
    launcher: str
    """local: everything runs on this machine. Otherwise the name of a cluster that an extension has, on whose machines
    the run is a job (docs/extensions.md); slurm is set by cluster=slurm."""
    nodes: Count | None
    """Number of machines of the job; unset: as many as the ranks need."""
    trainer_nodes: Count | None
    """Number of leading machines reserved for trainers; unset: engines use what trainers leave free."""
    cpu_nodes: Natural
    """Number of machines without GPUs, for router and rollouts: the first ones of the job."""
    signal_seconds: Count
    """Seconds before the time limit of a job, or a preemption, at which it writes a checkpoint and ends, to be started
    again. Must exceed a step, a publish and a checkpoint together."""
    host: str | None
    """Address that every server binds to; unset: each machine's own address on `cluster.interface`."""
    interface: str | None
    """Network interface of those addresses (eth0, ib0); unset: the interface of the route to other machines."""
    tls: bool
    """Encrypt all connections; every server presents a certificate signed by the run. Nobody else on the machines or
    between them can then read the run's API key or impersonate one of its servers. false makes requests cheaper, for
    machines that nobody else uses (docs/security.md)."""
    gpus: Natural | None
    """Number of GPUs to use on each machine; unset: all of them. Required for a job that is submitted."""
    stall_timeout: Positive | None
    """Seconds for which the rollout process or a trainer rank may make no progress: spend in one micro-batch, or send
    no heartbeat. Then it is started again if it may be (on_death); otherwise the run ends, and RUN/logs/NAME.stack
    shows the stack of each of them. Must exceed the duration of the longest micro-batch; unset: no check."""
    preflight: bool
    """Check versions, model files, memory, folders and network before anything is started, and refuse to start a run
    that would fail (docs/operations.md). --check runs only these checks, on any machine."""
    on_engine_death: Literal["restart", "fail"]
    """What happens when an engine or the router dies or hangs during a run. restart: it is started again (an engine
    receives all weights and serves once its checksum is confirmed); fail: the run ends."""
    on_death: Literal["recover", "end"]
    """What happens when a trainer rank or the rollout process is killed, hangs, or raises an error that is neither the
    user's code nor a setting. recover: with checkpoint.every set, it is started again and goes on without loss, while
    the others work or wait: trainers from the newest checkpoint and the batches since then, the rollout process from
    its last state (docs/runs.md); end: the run ends."""
    max_restarts: Natural
    """Maximum number of restarts of each engine, of the router, of the trainers, of the rollout process, and of each
    process that only plays episodes; the next death ends the run."""
    stop_grace: Positive
    """Seconds between asking a process to stop and killing it."""

    @property
    def is_local(self) -> bool:
        """Return whether the run has this machine alone, and is no job."""
        return self.launcher == "local"

    @property
    def shares_gpus(self) -> bool:
        """Return whether the engines use the GPUs of the trainers."""
        return self.placement != "separate"

    @model_validator(mode="after")
    def _has_one_address(self) -> ClusterConfig:
        if self.host is not None and (self.host in ("0.0.0.0", "::", "*") or not self.host.strip()):
            remedy = "Must be one address that others can reach: leave it unset, or name an interface's address."
            raise ConfigError("cluster.host", self.host, remedy)
        return self

    @model_validator(mode="after")
    def _fits_its_launcher(self) -> ClusterConfig:
        if self.is_local:
            for field in ("nodes", "trainer_nodes", "cpu_nodes"):
                if value := getattr(self, field):
                    remedy = "It applies to jobs only: name a cluster (cluster.launcher), or remove it."
                    raise ConfigError(f"cluster.{field}", value, remedy)
        return self


class MetricsConfig(Section):
    """Metric outputs in addition to metrics.jsonl and summary.json, which are always written: docs/operations.md."""

    console: bool
    """Show the progress of the run on the terminal: a live table, or one line per step where the output is no
    terminal."""
