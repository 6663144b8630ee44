"""Program of mode=rollout_only: python -m asyncrl.extensions.collect.program RUN_DIR, in place of the trainers.

Batches are taken, and thereby recorded, but nothing is trained: the version advances, and the engines keep their
weights.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from asyncrl import jsonl, lookup
from asyncrl.config import read
from asyncrl.engine.fleet import build_fleet
from asyncrl.engine.update import Update
from asyncrl.metrics.record import StepLog
from asyncrl.network.addresses import Addresses
from asyncrl.progress import failing
from asyncrl.schema import decode_batch
from asyncrl.trainer.batch_source import RolloutClient
from asyncrl.trainer.stop import StopRule


def main(run_dir: Path) -> None:
    """Take batches until a stop rule holds."""
    config, addresses = read(run_dir), Addresses.read(run_dir)
    fleet = build_fleet(config, addresses, run_dir, decides=True)
    update = Update(fleet, mode=config.weights.pause_mode)
    source = RolloutClient(addresses.rollout, addresses.access, config.rollout.batch_timeout)
    listeners = lookup.step_listeners(config, run_dir, addresses.model, partial(_warn, run_dir))
    records = [partial(jsonl.append, run_dir / "metrics.jsonl")]
    log = StepLog(records, started_at=addresses.started_at, tasks=tuple(config.mixture), listeners=listeners)
    stop = StopRule(config.run)

    def publish(version: int) -> dict[str, float]:
        """Make the engines serve their unchanged weights as the next version."""
        fleet.reconcile()
        source.hold()
        with update.paused() as pause:
            update.label(version)
        source.announce(version)
        return {"pause": pause.seconds, "verify": 0.0, "bytes": 0.0, "engines": float(len(fleet.serving))}

    version = 0
    while True:
        with log.span("wait_batch"):
            while not (data := source.batch(version, interrupt=fleet.needs_weights)):
                publish(version)  # restarted engines hold the initial weights, which are still the current ones
        version += 1
        with log.span("publish"):
            sent = publish(version)
        if reason := stop.reason(log.step(version, decode_batch(data), {}, sent)):
            break
    summary = {"reason": reason, **log.summary(config.run.reward_window), "ledger": source.status()["ledger"]}
    jsonl.replace(run_dir / "summary.json", summary)
    if not log.close():
        os._exit(0)  # the listeners' threads would wait for their servers at the end of the process


def _warn(run_dir: Path, text: str, version: int) -> None:
    jsonl.append(run_dir / "warnings.jsonl", {"version": version, "warning": text})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    with failing(Path(sys.argv[1]), "collect"):
        main(Path(sys.argv[1]))
