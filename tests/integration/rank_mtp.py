"""One trainer rank of a test of multi-token prediction: python rank_mtp.py FOLDER LAYOUT, under torchrun.

For each model that FOLDER/LAYOUT.json names, writes the weights that it exports after loading, the log-probabilities
that its layer of multi-token prediction gives to the targets of a batch, and all gradients under their HF names. Then
takes optimizer steps with the layer, without it, and with a layer whose loss is NaN, and writes weights and norms.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from asyncrl.backends.cpu import megatron_shim

megatron_shim.enable()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack, pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer import network as module  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from tests.integration.families import groups  # noqa: E402

WEIGHTS = {"with": 50.0, "broken": math.nan, "without": None}
"""What the loss of the layer is multiplied by."""
STEPS = [*(("float32", kind) for kind in WEIGHTS), ("bfloat16", "with"), ("bfloat16", "without")]


def trained(trainer: TrainerConfig, model: Path, parallel: Parallel, batch: Pack, weight: float | None) -> Any:
    """Return the weights after two clipped steps, and norms: those that the steps returned, those of the layer, and of
    the clipped gradients of both."""
    network = Network(trainer, model, parallel)
    optimizer, norms = NetworkOptimizer(trainer, network, 100), []
    if trainer.dtype == "bfloat16":
        optimizer._fused = False  # clip as on GPUs

    def visit(head: Head, pack: Pack) -> Tensor:
        logprobs, _ = head.score(pack, 1.0)
        return logprobs.sum() + (0.0 if weight is None else weight * head.drafts.score(pack, 1.0)[0].sum())

    for _ in range(2):
        optimizer.zero_grad()
        network.train([batch], visit)
        norm, applied = optimizer.step()
        assert applied
        policy, drafts = optimizer._masters_by_use()
        clipped = [optimizer._norm(hidden=hidden) for hidden in (drafts, policy)]
        norms.append([norm, optimizer.draft_norm, *clipped])
    network.gather()
    weights = {name: tensor.clone() for name, tensor in network.weights.hf_tensors()}
    return {**weights, "norms": torch.tensor(norms, dtype=torch.float64)}


def main(folder: Path, layout: str) -> None:
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    # whole gradients on every rank, not the shards of an optimizer
    own = module.DistributedDataParallelConfig
    whole: Any = lambda **fields: own(**fields | {"use_distributed_optimizer": False})  # noqa: E731
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)
    batch = pack(groups()[parallel.dp_rank :: parallel.dp], multiple=parallel.tp)
    for name in settings["models"]:
        module.DistributedDataParallelConfig = whole  # type: ignore[misc]
        network = Network(trainer, folder / name, parallel)
        exported = {name: tensor.clone() for name, tensor in network.weights.hf_tensors()}
        drafted: list[Tensor] = []

        def visit(head: Head, pack: Pack, drafted: list[Tensor] = drafted) -> Tensor:
            logprobs, _ = head.score(pack, 1.0)
            if head.drafted is None:
                return logprobs.sum()
            drafts, _ = head.drafts.score(pack, 1.0)
            drafted.append(drafts.detach())
            return logprobs.sum() + 0.5 * drafts.sum()

        network.train([batch], visit)
        for parameter in network.parameters():
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        gradients = {name: tensor.clone() for name, tensor in network.weights.hf_tensors()}
        keys = sorted({box.key for one in network.placed() for box in one.boxes})
        if parallel.exports:
            (folder / f"{layout}-{name}.keys").write_text(json.dumps(keys))
            save_file(exported, folder / f"{layout}-{name}.weights")
            save_file(gradients, folder / f"{layout}-{name}.gradients")
            if drafted:
                save_file({"logprobs": drafted[0]}, folder / f"{layout}-{name}.drafts")
        module.DistributedDataParallelConfig = own  # type: ignore[misc]
        for dtype, kind in STEPS if trainer.mtp else ():
            changed = {"mtp": None if kind == "without" else trainer.mtp, "dtype": dtype}
            stepped = trained(trainer.model_copy(update=changed), folder / name, parallel, batch, WEIGHTS[kind])
            if parallel.exports:
                save_file(stepped, folder / f"{layout}-{name}.{dtype}.{kind}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]), sys.argv[2])
