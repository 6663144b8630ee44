"""Entry point of a trainer rank: `python -m asyncrl.trainer RUN_DIR`, in torchrun's environment.

Connects the policy, the batch source, the publisher, the checkpoints and the log.
"""

from __future__ import annotations

from asyncrl import import_hooks

# isort: split
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl import platforms

platforms.here().prepare_trainer()  # must run before the first import of megatron.core

import torch.distributed as dist  # noqa: E402

from asyncrl import extension, jsonl, lookup  # noqa: E402
from asyncrl.checkpoints.store import CheckpointStore  # noqa: E402
from asyncrl.engine.fleet import build_fleet  # noqa: E402
from asyncrl.errors import PeerFailed  # noqa: E402
from asyncrl.jsonl import Tail  # noqa: E402
from asyncrl.metrics.record import StepLog, accuracies, dtype_figures  # noqa: E402
from asyncrl.network.addresses import MACHINE, PEER_FAILED, STOP, STOPPED  # noqa: E402
from asyncrl.observability.timeline import BatchScores  # noqa: E402
from asyncrl.progress import Progress, failing  # noqa: E402
from asyncrl.schema import Batch  # noqa: E402
from asyncrl.trainer.batch_source import BatchSource, RolloutClient  # noqa: E402
from asyncrl.trainer.checkpoint import Checkpoints, Saving  # noqa: E402
from asyncrl.trainer.feed import BatchFeed  # noqa: E402
from asyncrl.trainer.gpu_sharing import share_gpu  # noqa: E402
from asyncrl.trainer.loop import ASKED, train  # noqa: E402
from asyncrl.trainer.parallel import host_group  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from asyncrl.trainer.policy_state import PolicyState  # noqa: E402
from asyncrl.trainer.publishers import build_publisher  # noqa: E402
from asyncrl.trainer.rank import Rank, join  # noqa: E402
from asyncrl.trainer.recovery import Start, find_start  # noqa: E402
from asyncrl.trainer.stop import StopRule  # noqa: E402
from asyncrl.weights.publish import VersionPublisher  # noqa: E402


def main(run_dir: Path) -> None:
    """Train one run on this rank."""
    import_hooks.done()
    rank = join(run_dir)
    config, addresses, parallel = rank.config, rank.addresses, rank.parallel
    fleet = build_fleet(config, addresses, run_dir, decides=parallel.is_first)
    sharing = share_gpu(rank, fleet)
    policy = Policy(config, addresses.model, parallel, rank.progress.part)
    state = PolicyState(policy)
    if config.checkpoint.every:
        state.keep_base(run_dir, addresses.resume)
    client = partial(RolloutClient, addresses.rollout, addresses.access, config.rollout.batch_timeout)
    source = policy.batches(client) or client()
    start = find_start(rank, source, fleet)
    log = _log(rank, start)
    stop = StopRule(config.run, source.end)
    publisher, transport = build_publisher(rank, policy, fleet, source, sharing, log, start)
    checkpoints = Checkpoints(
        rank,
        state,
        counters=lambda: {"stop": stop.counters(), "log": log.counters()},
        snapshot=source.snapshot,
    )
    _begin(rank, start, publisher, checkpoints, log, stop)
    batches = BatchFeed(
        source if parallel.is_first else None,
        lambda: publisher.idle() and fleet.needs_weights(),
        parallel,
        parts=config.trainer.batch_parts,
        asked_to_stop=(run_dir / STOP).exists,
        take_back=publisher.take_back,
        group=host_group(rank.timeout) if config.weights.overlap or config.cluster.shares_gpus else None,
    )
    saving = Saving(rank, policy, publisher, checkpoints, log, start)
    update = _measured(rank, policy, publisher)
    reason, version = train(update, batches, publisher, log, stop, save=saving.after_step, version=start.version)
    rank.begins("end", version)
    saving.at_the_end(version, export=reason != ASKED)
    rank.phases.close()
    evaluated: list[dict[str, Any]] | None = []
    while config.eval_sets and reason != ASKED and (evaluated := batches.evaluate()) is None:
        publisher.publish(version)  # as while training waits
        publisher.finish()
    if parallel.is_first:
        _tell_the_end(rank, source, log, evaluated or [], reason=reason, transport=transport, **checkpoints.figures())
    _leave(log, rank.progress)


def _log(rank: Rank, start: Start) -> StepLog:
    """Return the log of this rank. That of rank 0 also writes and sends the metrics."""
    config, run_dir = rank.config, rank.run_dir
    sinks = list[Callable[[dict[str, float]], None]]()
    listeners = list[extension.StepListener]()
    if rank.parallel.is_first:
        first = start.written + 1 if start.checkpoint or start.recovered else None
        sinks = [partial(jsonl.append, run_dir / "metrics.jsonl")]
        listeners = lookup.step_listeners(config, run_dir, rank.addresses.model, rank.warn, first)
    return StepLog(
        sinks,
        started_at=rank.addresses.started_at,
        tasks=tuple(config.mixture),
        begins=rank.begins,
        ended=rank.phases,
        listeners=listeners,
        written=start.written,
    )


def _begin(
    rank: Rank,
    start: Start,
    publisher: VersionPublisher,
    checkpoints: Checkpoints,
    log: StepLog,
    stop: StopRule,
) -> None:
    """Restore the run from its checkpoint, if there is one, and give the engines the weights to begin with, if they
    have others, or none. The steps before it are read from the run folder."""
    config, version = rank.config, start.version
    if start.checkpoint:
        counters = checkpoints.load(start.checkpoint)
        stop.restore(counters["stop"])
        lines = Tail(rank.run_dir / "metrics.jsonl")()
        log.restore(counters["log"], [step for step in lines if step["version"] <= version])
    changed = rank.addresses.attached or config.changes_base
    if start.checkpoint or start.recovered or changed:
        if config.mode == "train" and rank.parallel.is_first:
            rank.wait_for_engines()
        publisher.publish(version)  # verified like a first publish; the engines resume only afterwards
        publisher.finish()
    if start.checkpoint and (start.recovered or start.checkpoint.parent == CheckpointStore(rank.run_dir).folder):
        checkpoints.resumed(version)
    elif start.checkpoint:
        checkpoints.save(version)  # into this run's own folder, so that the next resume=auto finds it


def _measured(rank: Rank, policy: Policy, publisher: VersionPublisher) -> Callable[[Batch], dict[str, float]]:
    """Return the update of a batch, or of a part of one, that is measured, and with the last part also recorded."""
    meter = policy.network.meter

    def update(batch: Batch) -> dict[str, float]:
        with policy.around_update(batch, rank.run_dir), publisher.training():
            metrics = meter.measure(policy.update, batch)
        if batch.last:
            for name, began, ended in meter.spans():
                rank.phases(name, batch.version, began, ended)
            if rank.parallel.is_first:
                rank.phases.tell(BatchScores(batch.version, policy.started))
        return metrics

    return update


def _tell_the_end(rank: Rank, source: BatchSource, log: StepLog, evaluated: list[dict[str, Any]], **facts: Any) -> None:
    """Write summary.json; a run that was asked to stop is only marked as stopped, because it resumes later."""
    config, run_dir = rank.config, rank.run_dir
    if facts["reason"] == ASKED:
        (run_dir / STOP).rename(run_dir / STOPPED)
        return
    before = Tail(run_dir / "eval.jsonl")()[: len(evaluated)]
    accuracy, metrics = accuracies(before, evaluated), log.summary(config.run.reward_window)
    summary = {**facts, **metrics, **accuracy, **dtype_figures(json.loads((run_dir / MACHINE).read_text()))}
    for one in lookup.active(config).values():
        summary |= one.summary(config, run_dir, metrics)
    status = source.status()
    if "recoveries" in facts:
        summary["recoveries"] += status["restarts"]
    jsonl.replace(run_dir / "summary.json", {**summary, "ledger": status["ledger"]})


def _leave(log: StepLog, progress: Progress) -> None:
    """End this process, after every rank has arrived here."""
    closed = log.close()
    dist.barrier()  # the first process to leave ends the run: all ranks wait here until rank 0 has written the summary
    dist.destroy_process_group()
    progress.end()
    if not closed:
        os._exit(0)  # the listeners' threads would wait for their servers at the end of the process


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher decides the order
    try:
        with failing(Path(sys.argv[1]), f"trainer-{os.environ['RANK']}"):
            main(Path(sys.argv[1]))
    except PeerFailed:
        traceback.print_exc()
        sys.exit(PEER_FAILED)
