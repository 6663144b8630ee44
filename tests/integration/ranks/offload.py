"""What a trainer rank moves to host memory between updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import TrainerConfig
from asyncrl.extensions.lora.transformation import transformation_of
from asyncrl.extensions.offload.device_memory import DeviceMemory, HeldTensors
from asyncrl.parallel import Parallel
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.sharded import ShardedState
from tests.integration.ranks.joining import joined
from tests.integration.ranks.updates import weighted_loss
from tests.integration.updates import drawn_samples

UPDATES = 3
Values = dict[str, Tensor]


class Trained:
    """A network with its optimizer, and what a test compares."""

    def __init__(self, trainer: TrainerConfig, folder: Path, parallel: Parallel) -> None:
        self.network = Network(trainer, folder, parallel, transformation=transformation_of(trainer.lora))
        self.optimizer = NetworkOptimizer(trainer, self.network, 100)
        self.memory = DeviceMemory(self._held, stand_in=True)
        self.state = ShardedState(self.network, self.optimizer, self.memory.readable)
        self.saved()  # trainer/checkpoint.py prepares its staging memory before the first offload

    def _held(self) -> HeldTensors:
        network = self.network
        weights = [*network.parameters(), *network.packed()]
        return HeldTensors(weights, network.gradients(), list(self.optimizer.states()))

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.network.train(self.network.packs(drawn_samples()), weighted_loss)
        self.optimizer.step()

    def published(self) -> Values:
        return {name: tensor.clone() for name, tensor in self.network.weights.hf_tensors()}

    def saved(self) -> Values:
        return {f"{one.key} {one.box.offset}": one.tensor.clone() for one in self.state.written()}

    def bytes_on_device(self) -> int:
        held = self._held()
        storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for part in held for one in part}
        return sum(storages.values())


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def moved(trainer: TrainerConfig, model: Path, kind: type[Trained] = Trained) -> dict[str, Any]:
    """Train a network twice, once with all of its storages moved away between the updates, which must change no bit of
    what is published and saved. Returns what was equal, and the bytes on the device at each stage."""
    torch.manual_seed(0)
    parallel = joined(trainer)
    plain, moved = (kind(trainer, model, parallel) for _ in range(2))
    everything, found = moved.bytes_on_device(), []
    for _ in range(UPDATES):
        plain.update()
        moved.memory.onload(everything=True)
        moved.update()
        everything = moved.bytes_on_device()
        moved.memory.offload(parameters=False)
        weights_alone = moved.bytes_on_device()
        published = moved.published()
        moved.memory.offload(parameters=True)
        moved.memory.offload(parameters=True)  # no-op
        found.append(
            {
                "everything": everything,
                "weights_alone": weights_alone,
                "nothing": moved.bytes_on_device(),
                "published": same(published, plain.published()),
                "saved": same(moved.saved(), plain.saved()),
            }
        )
        moved.memory.onload(everything=False)
        assert moved.bytes_on_device() == weights_alone
    moved.memory.onload(everything=True)
    assert moved.bytes_on_device() == everything
    parameters = sum(one.nbytes for one in plain.network.parameters())
    return {"updates": found, "parameters": parameters, "restored": same(moved.saved(), plain.saved())}
