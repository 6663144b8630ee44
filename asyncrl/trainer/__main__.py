"""Entry point of a trainer rank: `python -m asyncrl.trainer RUN_DIR`, in torchrun's environment.

Connects the policy, the batch source, the publisher, the checkpoints and the log.
"""

from __future__ import annotations

from asyncrl import importing

# isort: split
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl import platforms

platforms.here().prepare_trainer()  # must run before the first import of megatron.core

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from asyncrl import jsonl  # noqa: E402
from asyncrl.checkpoints import manifest  # noqa: E402
from asyncrl.checkpoints.store import CheckpointStore  # noqa: E402
from asyncrl.config import Config, on_gpu, read  # noqa: E402
from asyncrl.engine.fleet import Fleet, build_fleet  # noqa: E402
from asyncrl.engine.hand_over import HandOver  # noqa: E402
from asyncrl.errors import PeerFailed, visible  # noqa: E402
from asyncrl.jsonl import Tail  # noqa: E402
from asyncrl.metrics.gap import GapWatch  # noqa: E402
from asyncrl.metrics.record import StepLog, accuracies, machine_figures, plan_figures  # noqa: E402
from asyncrl.metrics.sinks import Sinks  # noqa: E402
from asyncrl.network.addresses import MACHINE, PEER_FAILED, PLAN, READY, STOP, STOPPED, Addresses  # noqa: E402
from asyncrl.observability.timeline import TimelineWriter  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.progress import Progress, failing  # noqa: E402
from asyncrl.schema import Batch  # noqa: E402
from asyncrl.trainer import checkpoint, lora, recovery  # noqa: E402
from asyncrl.trainer.batch_source import BatchSource, RolloutClient, wait_for_file  # noqa: E402
from asyncrl.trainer.checkpoint import Checkpoints  # noqa: E402
from asyncrl.trainer.feed import BatchFeed  # noqa: E402
from asyncrl.trainer.loop import ASKED, VersionPublisher, train  # noqa: E402
from asyncrl.trainer.meter import profiled  # noqa: E402
from asyncrl.trainer.parallel import host_group, initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from asyncrl.trainer.publishers import PublisherBuilder  # noqa: E402
from asyncrl.trainer.recordings import NoEngines, ReplaySource, ScoreWriter  # noqa: E402
from asyncrl.trainer.recovery import CatchingUp, Recovery  # noqa: E402
from asyncrl.trainer.stop import StopRule  # noqa: E402
from asyncrl.trainer.turns import Turns  # noqa: E402
from asyncrl.weights.checksum import Checksums  # noqa: E402
from asyncrl.weights.export import save_trained  # noqa: E402
from asyncrl.weights.overlap import OverlappedPublisher  # noqa: E402
from asyncrl.weights.publish import Publisher  # noqa: E402

TIMEOUT_MARGIN = 120.0  # seconds: the collectives of the other ranks time out this long after rank 0's own deadline
DOING = {
    "start": "starting",
    "wait_batch": "waiting for a batch",
    "release": "waiting for the engines to release their memory",
    "train": "training",
    "publish": "publishing weights",
    "save": "saving a checkpoint",
    "end": "ending the run",
}


def main(run_dir: Path) -> None:
    """Train one run on this rank."""
    importing.done()
    addresses = Addresses.read(run_dir)
    config, changed = recovery.adapted(read(run_dir), run_dir)
    timeout = longest_wait(config) + TIMEOUT_MARGIN
    progress, begins, parallel = _join(config, run_dir, timeout, gpu=on_gpu(config.trainer, addresses.gpus))
    fleet = build_fleet(config, addresses, run_dir, decides=parallel.is_first)
    hand_over = _hand_over(config, run_dir, fleet, parallel) if config.cluster.shares_gpus else None
    policy = Policy(config, addresses.model, parallel, progress.part)
    if config.checkpoint.every and (base := lora.base_format(config.trainer.lora)):
        origin = addresses.resume.parent.parent if addresses.resume else None
        base.keep(run_dir, origin, policy.weights, parallel)
    recorded = ReplaySource(config.replay) if config.mode == "replay" else None
    source = _source(config, addresses, recorded)
    first, end = (recorded.first, recorded.end) if recorded else (0, None)
    build = PublisherBuilder(config, addresses, run_dir, parallel, policy, fleet, source, timeout)
    publisher, why = build.publisher(hand_over.update if hand_over else None)
    warn = partial(_warn, run_dir)
    timeline = _timeline(config, run_dir, parallel, warn)
    overlapped = _overlapped(publisher, timeline, parallel) if config.weights.overlap else None
    if changed and parallel.is_first:
        warn(changed, 0)
    recovered = recovery.find(run_dir, addresses.resume, source, fleet, parallel)
    resumed = recovered.checkpoint if recovered else addresses.resume
    log = _log(config, addresses, run_dir, parallel, begins, timeline, resumed, recovered)
    turns = Turns(hand_over, policy.memory, publisher, log, source.hold) if config.cluster.takes_turns else None
    sender, publisher = publisher, turns or overlapped or publisher
    published = overlapped.finish if overlapped else lambda: None
    stop = StopRule(config.run, end)
    store = CheckpointStore(run_dir)
    checkpoints = Checkpoints(
        *(config, store, addresses.run_id, parallel, policy),
        counters=lambda: {"stop": stop.counters(), "log": log.counters()},
        snapshot=source.snapshot,
        warn=warn,
    )
    if resumed:
        first = _go_on(resumed, run_dir, policy, log, stop)
    if recovered:
        tell = warn if parallel.is_first else None
        publisher = CatchingUp(publisher, first, recovered, fleet, partial(_verified, sender), tell)
    others = resumed or recovered or addresses.attached or turns or config.changes_base
    if others:  # the engines have other weights, or none
        if config.mode == "train" and parallel.is_first:
            wait_for_file(run_dir / READY, config.engine.start_timeout, "the engines")
        publisher.publish(first)  # verified like a first publish; the engines resume only afterwards
        published()
    if resumed and (recovered or resumed.parent == store.folder):
        checkpoints.resumed(first)
    elif resumed:
        checkpoints.save(first)  # into this run's own folder, so that the next resume=auto finds it

    def export(folder: Path, version: int) -> None:
        with turns.parameters(version) if turns else nullcontext():
            save_trained(folder, addresses.model, policy.weights, parallel, config.trainer, config.adapters)

    def save(version: int) -> None:
        if config.trainer.save_hf_every and version % config.trainer.save_hf_every == 0:
            export(run_dir / f"hf-{version:06d}", version)
        if checkpoints.due(version) and not (recovered and version <= recovered.served):
            with log.span("save"):
                published()  # the rollout side is saved between a version and its batch
                checkpoints.save(version)

    measured = partial(policy.network.meter.measure, policy.update)
    scores = ScoreWriter(run_dir, warn) if config.record and config.mode == "train" and parallel.is_first else None

    def update(batch: Batch) -> dict[str, float]:
        with profiled(batch.version + 1, config.trainer.profile if batch.last else (), run_dir, parallel):
            figures = turns.update(measured, batch) if turns else measured(batch)
        if not batch.last:
            return figures
        for name, start, end in policy.network.meter.spans():
            timeline.phase(name, batch.version, start, end)
        if scores:
            scores.write(batch.version, policy.started)
        return figures

    batches = BatchFeed(
        source if parallel.is_first else None,
        overlapped.idle_and(fleet.needs_weights) if overlapped else fleet.needs_weights,
        parallel,
        parts=config.trainer.batch_parts,
        asked_to_stop=(run_dir / STOP).exists,
        take_back=turns.take_back if turns else lambda: None,
        group=host_group(timeout) if overlapped or config.cluster.shares_gpus else None,
    )
    reason, version = train(update, batches, publisher, log, stop, save=save, version=first)
    begins("end", version)
    published()
    checkpoints.save(version)
    if reason != ASKED:
        export(run_dir / "hf", version)
    checkpoints.finish()
    timeline.close()
    if scores:
        scores.close()
    if parallel.is_first:
        _tell_the_end(config, run_dir, source, log, {"reason": reason, "transport": why, **checkpoints.figures()})
    _leave(log, progress)


def _leave(log: StepLog, progress: Progress) -> None:
    """End this process, after every rank has arrived here."""
    closed = log.close()
    dist.barrier()  # the first process to leave ends the run: all ranks wait here until rank 0 has written the summary
    dist.destroy_process_group()
    progress.end()
    if not closed:
        os._exit(0)  # the packages of sinks would wait for their servers at the end of the process


def _join(
    config: Config, run_dir: Path, timeout: float, *, gpu: bool
) -> tuple[Progress, Callable[[str, int], None], Parallel]:
    """Join the run's process group, whose collectives have this timeout. Returns the same as `watched`, and this rank's
    position."""
    progress, begins = watched(config, run_dir, timeout - TIMEOUT_MARGIN / 2, gpu=gpu)
    parallel = initialize(config.trainer, gpu=gpu, seed=config.run.seed, timeout=timeout)
    if gpu and config.trainer_fraction:
        # A rank that needs more gets torch's own error, and the engine beside it keeps its memory.
        torch.cuda.set_per_process_memory_fraction(config.trainer_fraction)
    if config.deterministic:  # a call, even with False, imports torch's compiler in 1 CPU second
        torch.use_deterministic_algorithms(True)
    return progress, begins, parallel


def longest_wait(config: Config) -> float:
    """Return the most seconds that rank 0 waits for others within a part of a step: for a batch, or for engines. Where
    engines hand over GPUs, they are paused and release their memory before and after the wait for those that are being
    restarted (engine/hand_over.py)."""
    hands_over = config.cluster.takes_turns
    engines = config.engine.start_timeout + (4 * config.weights.timeout if hands_over else 0.0)
    return max(config.rollout.batch_timeout, engines, config.weights.timeout)


def watched(config: Config, run_dir: Path, longest: float, *, gpu: bool) -> tuple[Progress, Callable[[str, int], None]]:
    """Return this rank's progress reporter and a callback that marks the start of each part of a step. Training has the
    default deadline, except that the first step on a GPU also compiles kernels. That step gets `longest` seconds for
    each micro-batch, and so does every other part, which waits for processes that have their own deadlines."""
    progress = Progress(run_dir, f"trainer-{os.environ['RANK']}", config.cluster.stall_timeout)
    compiles = gpu

    def begins(span: str, step: int) -> None:
        nonlocal compiles
        progress.doing(f"step {step}, {DOING[span]}", within=None if span == "train" and not compiles else longest)
        compiles = compiles and span != "train"

    begins("start", 0)
    progress.watch()
    return progress, begins


def _overlapped(publisher: VersionPublisher, timeline: TimelineWriter, parallel: Parallel) -> OverlappedPublisher:
    """Return a publisher that works in the background. If it fails on another rank than 0, whose loop raises the error
    while it waits for a batch, that rank ends, because it may be waiting for rank 0 in a collective."""
    assert isinstance(publisher, Publisher | NoEngines)  # adapters are refused by config/overlap.py

    def leave(error: BaseException) -> None:
        if not parallel.is_first:
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    return OverlappedPublisher(publisher, ended=partial(timeline.phase, thread="publish"), failed=leave)


def _hand_over(config: Config, run_dir: Path, fleet: Fleet, parallel: Parallel) -> HandOver | None:
    """Wait for the engines that use the trainers' GPUs: they have measured the memory, so that this rank may use its
    GPU. Return, on rank 0, the hand-over of those that do so in turns, which have released their memory."""
    hand_over = None
    if parallel.is_first:
        timeout = config.engine.start_timeout
        wait_for_file(run_dir / READY, timeout, "the engines")
        if config.cluster.takes_turns:
            hand_over = HandOver(fleet, mode=config.weights.pause_mode, start_timeout=timeout, folder=run_dir)
            hand_over.give()
    dist.barrier()
    return hand_over


def _source(config: Config, addresses: Addresses, recorded: ReplaySource | None) -> BatchSource:
    """Return the source of batches: the rollout process, unless recorded batches are trained without one."""
    if recorded and not config.replay.schedule:
        return recorded
    return RolloutClient(addresses.rollout, addresses.access, config.rollout.batch_timeout)


def _go_on(folder: Path, run_dir: Path, policy: Policy, log: StepLog, stop: StopRule) -> int:
    """Restore the run from a checkpoint and return its version. The steps before it are read from the run folder."""
    counters = checkpoint.load(folder, policy)
    stop.restore(counters["stop"])
    version = manifest.read(folder).version
    log.restore(counters["log"], [step for step in Tail(run_dir / "metrics.jsonl")() if step["version"] <= version])
    return version


def _verified(publisher: VersionPublisher) -> Checksums | None:
    return publisher.verified if isinstance(publisher, Publisher) else None


def _warn(run_dir: Path, text: str, version: int) -> None:
    print(visible(text), file=sys.stderr, flush=True)
    jsonl.append(run_dir / "warnings.jsonl", {"version": version, "warning": text})


def _timeline(config: Config, run_dir: Path, parallel: Parallel, warn: Callable[[str, int], None]) -> TimelineWriter:
    process = f"trainer {parallel.rank}"
    return TimelineWriter(run_dir, process, lambda text: warn(text, 0), enabled=config.metrics.timeline)


def _log(
    config: Config,
    addresses: Addresses,
    run_dir: Path,
    parallel: Parallel,
    begins: Callable[[str, int], None],
    timeline: TimelineWriter,
    resumed: Path | None,
    recovered: Recovery | None,
) -> StepLog:
    """Return the log of this rank. That of rank 0 also writes and sends the metrics."""
    written = recovered.written if recovered else manifest.read(resumed).version if resumed else 0
    sinks, outputs = list[Callable[[dict[str, float]], None]](), None
    if parallel.is_first:
        warn = partial(_warn, run_dir)
        first = written + 1 if resumed or recovered else None
        sinks = [partial(jsonl.append, run_dir / "metrics.jsonl"), GapWatch(warn)]
        outputs = Sinks(config, run_dir, addresses.model, warn, first)
    return StepLog(
        sinks,
        started_at=addresses.started_at,
        tasks=tuple(config.mixture),
        begins=begins,
        ended=timeline.phase,
        outputs=outputs,
        written=written,
    )


def _tell_the_end(config: Config, run_dir: Path, source: BatchSource, log: StepLog, facts: dict[str, Any]) -> None:
    """Evaluate the final weights and write summary.json; a run that was asked to stop is only marked as stopped,
    because it resumes later."""
    if facts["reason"] == ASKED:
        (run_dir / STOP).rename(run_dir / STOPPED)
        return
    accuracy = accuracies([], [])
    if config.eval_sets and config.mode == "train":
        after = source.evaluate(timeout=config.rollout.batch_timeout)
        lines = (run_dir / "eval.jsonl").read_text().splitlines()
        accuracy = accuracies([json.loads(line) for line in lines[: len(after)]], after)
    figures = log.summary(config.run.reward_window)
    machine = json.loads((run_dir / MACHINE).read_text())
    plan, overlap = run_dir / PLAN, config.weights.overlap
    planned = plan_figures(json.loads(plan.read_text()), figures, overlap=overlap) if plan.exists() else {}
    told = {**machine_figures(machine, figures), **planned}
    status = source.status()
    recoveries = {"recoveries": facts["recoveries"] + status["restarts"]}
    summary = {**facts, **recoveries, **figures, **accuracy, **told, "ledger": status["ledger"]}
    jsonl.replace(run_dir / "summary.json", summary)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher decides the order
    try:
        with failing(Path(sys.argv[1]), f"trainer-{os.environ['RANK']}"):
            main(Path(sys.argv[1]))
    except PeerFailed:
        traceback.print_exc()
        sys.exit(PEER_FAILED)
