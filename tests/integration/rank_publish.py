"""One rank of the test of publishing from several pipeline stages: python rank_publish.py FOLDER ORDER WHEN.

The model, its layout and its gathers are real; the transport compares what it is given with the HF folder, and waits
for what the other stage must have done meanwhile. With WHEN=beside (weights.overlap), also for collectives of all ranks
in the training loop, which by then has changed the weights.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.config import read  # noqa: E402
from asyncrl.engine.fleet import Fleet  # noqa: E402
from asyncrl.engine.update import Update  # noqa: E402
from asyncrl.network.addresses import Access  # noqa: E402
from asyncrl.trainer import model as megatron  # noqa: E402
from asyncrl.trainer.parallel import split  # noqa: E402
from asyncrl.weights import publish  # noqa: E402
from asyncrl.weights.background import Background  # noqa: E402
from asyncrl.weights.bucket import Bucket, fill, views  # noqa: E402
from asyncrl.weights.layouts import Pieces, dims_of  # noqa: E402
from asyncrl.weights.publish import Outgoing, Publisher  # noqa: E402
from asyncrl.weights.reshard import Resharder  # noqa: E402
from asyncrl.weights.transport import Transport  # noqa: E402
from tests.integration.publisher import FakeRollout  # noqa: E402

PATIENCE = timedelta(seconds=60)
GONE = "http://127.0.0.1:9"
VERSIONS = (1, 2)


class NoEngines(Fleet):
    """A fleet whose engines nobody calls; it records which are lost."""

    def lose(self, url: str, reason: str) -> None:
        self.lost[url] = reason


class ComparedTransport(Transport):
    """Transport that compares every bucket with the folder, and its time with the other stage's progress."""

    def __init__(self, fleet: Fleet, stage: int, store: dist.Store, reference: dict[str, Tensor], turns: bool) -> None:
        self._fleet, self._stage, self._store, self._reference = fleet, stage, store, reference
        self.turns, self.sent, self.buckets = turns, 0, 0
        self.names: list[str] = []
        self.trained = threading.Event()
        self.trained.set()

    def start(self, version: int, *, full: bool = False) -> None:
        self._version, self.sent, self.names = version, 0, []

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        assert self.trained.wait(PATIENCE.total_seconds()), "training waits for the publish"
        self._store.set(f"{self._version}-sending-{self._stage}", "")
        if self.sent == 0 and self._stage == 0:  # a stage that waits has filled its memory, or sends at the same time
            other = "sending-1" if not self.turns else f"filled-1-{self.memories}"
            self._store.wait([f"{self._version}-{other}"], PATIENCE)
        if self.turns and self._stage == 1:
            assert self._store.check([f"{self._version}-sent-0"]), "stage 1 sends before stage 0 has"
            assert self._fleet.lost == {GONE: "by stage 0"}
        for name, tensor in views(flat, bucket).items():
            assert torch.equal(tensor, self._reference[name]), name
            self.names.append(name)
        self.sent += 1
        if self._stage == 0:
            self._fleet.lose(GONE, "by stage 0")
            if self.sent == self.buckets:
                self._store.set(f"{self._version}-sent-0", "")


def train_beside(publisher: Background, transport: ComparedTransport, weights: Resharder, version: int) -> None:
    """Publish, and change all weights between collectives of the groups that a step uses, while nothing is sent."""
    transport.trained.clear()
    publisher.publish(version)
    assert publisher._flight
    assert transport.sent == 0
    parameters = [parameter for chunk in weights._chunks for parameter in chunk.parameters()]
    held = [parameter.detach().clone() for parameter in parameters]
    for _ in range(20):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == dist.get_world_size()
        for parameter in parameters:
            parameter.data.add_(total)
    assert not publisher._flight.done()
    transport.trained.set()
    publisher.finish()
    for parameter, value in zip(parameters, held, strict=True):
        parameter.data.copy_(value)


def main(folder: Path, turns: bool, beside: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    store = dist.distributed_c10d._get_default_store()
    trainer = read(folder).trainer.model_copy(update={"tensor_parallel": 2, "pipeline_parallel": 2})
    parallel = split(trainer, torch.device("cpu"), seed=0)
    hf = megatron.read_hf_config(folder / "model")
    config = megatron.transformer_config(hf, trainer.model_copy(update={"dtype": hf["dtype"]}))
    weights = Resharder([megatron.build_model(hf, config, None)], hf["architectures"][0], dims_of(hf), parallel)
    weights.load(folder / "model")
    reference = load_file(folder / "model" / "model.safetensors")
    fleet = NoEngines([], Access(""), 5.0, on_lost=lambda *_: None)
    transport = ComparedTransport(fleet, parallel.pp_rank, store, reference, turns)
    stage, last = parallel.pp_rank, {"version": 0, "filled": 0}

    def noted_fill(flat: Tensor, bucket: Bucket, stream: Iterator[tuple[str, Pieces]]) -> dict[str, Tensor]:
        found = fill(flat, bucket, stream)
        last["filled"] += 1
        store.set(f"{last['version']}-filled-{stage}-{last['filled']}", "")
        return found

    publish.fill = noted_fill
    # buckets of one unit each, so that there are more than memories
    settings: Any = SimpleNamespace(
        staging="full" if beside else "stream",
        overlap=beside,
        pause_mode="in_place",
        verify=False,
        verify_every=None,
        bucket_mb=0,
    )
    publisher = Publisher(
        parallel,
        Update(fleet, mode="in_place"),
        transport,
        Outgoing(weights, lambda: None),  # type: ignore[arg-type, return-value]
        settings,
        FakeRollout(),
        group=dist.new_group(backend="gloo", timeout=PATIENCE) if beside else None,
    )
    background = Background(publisher)
    transport.buckets = len(publisher._plan)
    for version in VERSIONS:
        last.update(version=version, filled=0)
        if beside:
            train_beside(background, transport, weights, version)
        else:
            publisher.publish(version)
        if parallel.exports:
            assert transport.sent == transport.buckets > transport.memories
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, transport.names)
    assert sorted(name for rank in names for name in rank) == sorted(reference)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "turns", sys.argv[3] == "beside")
