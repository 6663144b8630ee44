"""What becomes of Megatron's shards: HF tensors, one parameter at a time, and publishes of several pipeline stages."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.config import TrainerConfig
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.network.addresses import Access
from asyncrl.parallel import Parallel
from asyncrl.trainer import model as megatron
from asyncrl.weights import publish
from asyncrl.weights.background import Background
from asyncrl.weights.bucket import Bucket, fill, views
from asyncrl.weights.layouts import Pieces, dims_of
from asyncrl.weights.loading import load
from asyncrl.weights.publish import Outgoing, Publisher
from asyncrl.weights.reshard import Resharder
from asyncrl.weights.transport import Transport
from tests.integration.publisher import FakeRollout
from tests.integration.ranks.joining import divided, met

Cases = dict[str, tuple[dict[str, Any], list[str]]]
"""Settings of a layout and names of models, by the name of the layout."""


def chunks_of(model: Path, trainer: TrainerConfig) -> list[GPTModel]:
    """Return this rank's chunks of a model, in its own number format and without its weights."""
    hf = megatron.read_hf_config(model)
    config = megatron.transformer_config(hf, trainer.model_copy(update={"dtype": hf["dtype"]}))
    stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    return [megatron.build_model(hf, config, stage) for stage in stages]


def loaded(chunks: list[GPTModel], model: Path, parallel: Parallel) -> Resharder:
    """Load a model's weights into its chunks."""
    hf = megatron.read_hf_config(model)
    weights = Resharder(chunks, hf["architectures"][0], dims_of(hf), parallel)
    load(weights, model)
    return weights


def same_bits(one: Tensor, other: Tensor) -> bool:
    both = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and both[0].equal(both[1])


# --- resharding -----------------------------------------------------------------------------------------------------


def exported(folder: Path, base: TrainerConfig, cases: Cases) -> dict[str, dict[str, Any]]:
    """Load every model in every layout of the cases and export it: exporting ranks together must give the HF folder
    back byte for byte, and hold no more than one parameter at a time."""
    met(timeout=60.0)  # of a rank that stays away from a gather
    found = {}
    for layout, (settings, models) in cases.items():
        split_of = base.pipeline_split.model_copy(update=settings.get("pipeline_split", {}))
        trainer = base.model_copy(update={**settings, "pipeline_split": split_of})
        with divided(trainer) as parallel:
            for name in models:
                found[f"{layout}/{name}"] = export_of(folder / name, trainer, parallel)
    return found


def export_of(model: Path, trainer: TrainerConfig, parallel: Parallel) -> dict[str, Any]:
    """Return what this rank exports of one model in one layout."""
    chunks = chunks_of(model, trainer)
    weights = loaded(chunks, model, parallel)
    exported = list(weights.hf_tensors())
    described = list(weights.described())
    with PeakMemory(tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())) as peak:
        for _ in weights.stream():
            pass
    reference = load_file(model / "model.safetensors") if exported else {}
    return {
        "exports": parallel.exports,
        "names": [name for name, _ in exported],
        "different": [name for name, tensor in exported if not same_bits(tensor, reference[name])],
        "described": described == [(name, tensor.dtype, tensor.shape) for name, tensor in exported],
        "largest": max((tensor.nbytes for tensor in reference.values()), default=0),
        "total": sum(tensor.nbytes for tensor in reference.values()),
        "peak": peak.bytes,
    }


class PeakMemory(TorchDispatchMode):
    """Peak memory of the tensors that are created in this context. Memory known before (`known`) does not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        alive = [tensor for made in self._made if (tensor := made()) is not None]  # held while they are counted
        storages = {s.data_ptr(): s.nbytes() for tensor in alive for s in [tensor.untyped_storage()]}
        self._made = [weakref.ref(tensor) for tensor in alive]
        self.bytes = max(self.bytes, sum(size for start, size in storages.items() if start not in self._known))
        return out


# --- publishing -----------------------------------------------------------------------------------------------------

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
        self.turns = turns
        self.sent = 0
        self.buckets = 0
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


def published(folder: Path, base: TrainerConfig, order: str, when: str) -> None:
    """Publish from two pipeline stages of two ranks, and assert that all tensors of the HF folder arrive once: in
    turns or at once, and with when=beside (weights.overlap) beside collectives of all ranks in the training loop, which
    by then has changed the weights.

    The model, its layout and its gathers are real; the transport compares what it is given with the folder, and waits
    for what the other stage must have done meanwhile.
    """
    turns, beside = order == "turns", when == "beside"
    met(timeout=PATIENCE.total_seconds())
    store = dist.distributed_c10d._get_default_store()
    trainer = base.model_copy(update={"tensor_parallel": 2, "pipeline_parallel": 2})
    with divided(trainer) as parallel:
        publish_all(folder / "model", trainer, parallel, store, turns=turns, beside=beside)


def publish_all(
    model: Path, trainer: TrainerConfig, parallel: Parallel, store: dist.Store, *, turns: bool, beside: bool
) -> None:
    """Publish all versions."""
    weights = loaded(chunks_of(model, trainer), model, parallel)
    reference = load_file(model / "model.safetensors")
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
