"""One trainer rank of test_step.py: python rank_step.py FOLDER, under torchrun. It writes clipped updates, then the
weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack, pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network, Transformation  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from tests.integration.updates import TIED, drawn_samples, token_weights  # noqa: E402


def adapters(trainer: TrainerConfig) -> Transformation | None:
    """Return the adapters of these settings, if there are some."""
    if trainer.lora.rank is None:
        return None
    from asyncrl.extensions.lora.transformation import Adapted

    return Adapted(trainer.lora)


def main(folder: Path) -> None:
    trainer = TrainerConfig.model_validate(json.loads((folder / "trainer.json").read_text()))
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)

    def visit(head: Head, one: Pack) -> Tensor:
        return -(token_weights()[one.table_rows] * head.score(one, 1.0)[0]).sum()

    for name in TIED:
        network = Network(trainer, folder / name, parallel, transformation=adapters(trainer))
        optimizer = NetworkOptimizer(trainer, network, 100)
        norms = []
        for split in (3, 2, 1):  # the first update has one micro-batch, later ones two
            optimizer.zero_grad()
            network.train([pack(part) for part in (drawn_samples()[:split], drawn_samples()[split:]) if part], visit)
            norms.append(optimizer.step()[0])
        save_file(
            {key: tensor.clone() for key, tensor in network.weights.hf_tensors()} | {"norms": torch.tensor(norms)},
            folder / f"{name}.safetensors",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
