"""A trainer that sleeps: python -m tests.integration.stub_trainer RUN_DIR.

The loop, the batch source, the fleet and the publisher are the product's own (trainer/loop.py); what is
missing is the arithmetic, and the bytes of the weights. Batches are kept in the run folder as they came.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from asyncrl import jsonl
from asyncrl.config import Config, WeightsConfig, read
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.registry import Registry
from asyncrl.engine.router import RouterWorkers
from asyncrl.engine.update import Update
from asyncrl.metrics.record import StepLog
from asyncrl.network.addresses import LOST, Addresses
from asyncrl.parallel import Parallel
from asyncrl.schema import decode_batch
from asyncrl.trainer.batch_source import RolloutClient
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.publish import Outgoing, Publisher
from asyncrl.weights.transport import Transport
from tests.integration.publisher import ALONE
from tests.integration.workload import Workload

BATCHES = "batches"
"""Name of the folder with the batches that the trainer received."""
SIP, PAUSE = 256, 0.01
"""Bytes that a slow reader takes at a time, and the seconds in between."""


class NoWeights(Transport):
    """Transport and weights of a publish that makes all calls, but sends nothing."""

    def described(self) -> Iterator[Any]:
        """Yield no tensors."""
        return iter(())

    def stream(self, *, merged: bool = True) -> Iterator[Any]:
        """Yield no tensors to send."""
        return iter(())

    def figures(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Raise an error, because there is nothing to send."""
        raise AssertionError("there is nothing to send")


def main(run_dir: Path) -> None:
    """Train every batch of the run, as trainer/loop.py does."""
    config, addresses, workload = read(run_dir), Addresses.read(run_dir), Workload.read()
    fleet = _fleet(config, addresses, run_dir)
    source = RolloutClient(addresses.rollout, addresses.access, config.rollout.batch_timeout)
    nothing: Any = NoWeights()
    parallel = Parallel(**{**ALONE, "device": torch.device("cpu")})
    publisher: Any = Publisher(
        parallel,
        Update(fleet, mode=config.weights.pause_mode),
        nothing,
        Outgoing(nothing, _none),
        unverified(config),
        source,
    )
    (run_dir / BATCHES).mkdir()
    log = StepLog([partial(jsonl.append, run_dir / "metrics.jsonl")], started_at=addresses.started_at)
    for version in range(config.run.max_steps):
        with log.span("wait_batch"):
            time.sleep(workload.late.get(version, 0.0))
            begun = read_slowly(addresses, version, workload.slow[version]) if version in workload.slow else b""
            while not (data := source.batch(version, interrupt=fleet.needs_weights)):
                publisher.publish(version)
        assert data.startswith(begun), f"batch {version} was another when it was asked for again"
        (run_dir / BATCHES / f"{version:06d}").write_bytes(data)
        batch = decode_batch(data)
        with log.span("train"):
            tokens = sum(group.num_tokens for group in batch.groups)
            time.sleep(workload.train_seconds + workload.train_per_token * tokens)
        with log.span("publish"):
            sent = publisher.publish(version + 1)
        log.step(version + 1, batch, {"tokens/trained": tokens}, sent)
    jsonl.replace(run_dir / "summary.json", {"ledger": source.status()["ledger"]})


def _fleet(config: Config, addresses: Addresses, run_dir: Path) -> Fleet:
    """Return the fleet as trainer/__main__.py creates it."""
    timeout = config.weights.timeout

    def note(url: str, incarnation: str, reason: str) -> None:
        jsonl.append(run_dir / LOST, {"engine": url, "incarnation": incarnation, "reason": reason, "time": time.time()})

    router = RouterWorkers(addresses.router, addresses.access, timeout)
    register = Registry(run_dir)
    return Fleet(addresses.engines, addresses.access, timeout, router=router, register=register, on_lost=note)


def unverified(config: Config) -> WeightsConfig:
    """Return the settings of publishes that send nothing which could be verified."""
    return config.weights.model_copy(update={"verify": False})


def _none() -> Any:
    raise AssertionError("weights.verify is off")


def read_slowly(addresses: Addresses, version: int, share: float) -> bytes:
    """Read this fraction of a batch, some bytes at a time, and disconnect.

    Return what was read; nothing if there is no batch.
    """
    source = urlsplit(addresses.rollout)
    reader = socket.socket()
    with reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIP)  # so that the sender feels it
        reader.settimeout(30.0)
        reader.connect((source.hostname, source.port))
        authorization = f"Authorization: {addresses.access.headers['Authorization']}"
        reader.sendall(f"GET /batch?version={version} HTTP/1.1\r\nHost: stub\r\n{authorization}\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += reader.recv(SIP) or _closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < share * int(fields[b"content-length"]):
            body += reader.recv(SIP) or _closed()
            time.sleep(PAUSE)
    return body


def _closed() -> bytes:
    raise AssertionError("the rollout server closed the connection of a slow reader")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(sys.argv[1]))
