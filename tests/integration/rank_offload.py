"""One trainer rank of test_offload.py: python rank_offload.py FOLDER, under torchrun. It trains a network twice, once
with all of its storages moved away between the updates, and writes what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.extensions.lora.transformation import transformation_of  # noqa: E402
from asyncrl.extensions.offload.device_memory import DeviceMemory, HeldTensors  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.sharded import ShardedState  # noqa: E402
from tests.integration.updates import drawn_samples, token_weights  # noqa: E402

UPDATES = 3
Values = dict[str, Tensor]


def visit(head: Head, one: Pack) -> Tensor:
    return -(token_weights()[one.table_rows] * head.score(one, 1.0)[0].float()).sum()


class Trained:
    """A network with its optimizer, and what a test compares."""

    def __init__(self, trainer: TrainerConfig, folder: Path, parallel: object) -> None:
        self.network = Network(  # type: ignore[arg-type]
            trainer, folder, parallel, transformation=transformation_of(trainer.lora)
        )
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
        self.network.train(self.network.packs(drawn_samples()), visit)
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


def main(folder: Path) -> None:
    trainer = TrainerConfig.model_validate(json.loads((folder / "trainer.json").read_text()))
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)
    plain, moved = (Trained(trainer, folder / "model", parallel) for _ in range(2))
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
    facts = {"updates": found, "parameters": parameters, "restored": same(moved.saved(), plain.saved())}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
