"""One trainer rank of test_losses.py: python rank_losses.py FOLDER, under torchrun.

With as many processes as it finds it takes every layout of losses.LAYOUTS in turn, and in each trains the model of
FOLDER with every algorithm, in float64. It writes figures and gradients by HF names. The policy, the network and
Megatron's schedules run as they are; their optimizer, which knows no float64, is one that descends by the gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.config import AlgoConfig, Config, read  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.schema import Batch  # noqa: E402
from asyncrl.trainer import network, policy  # noqa: E402
from asyncrl.trainer.parallel import split  # noqa: E402
from tests.fakes import changed, in_parts  # noqa: E402
from tests.integration.losses import ALGORITHMS, LAYOUTS, VERSION, groups, runs  # noqa: E402

RATE = 2.0  # moves the policy beyond its clip in one step


class Descent:
    """Replacement of the optimizer that records the gradient of each step and makes a plain gradient step."""

    lr = RATE

    def __init__(self, trained: network.Network, where: Parallel) -> None:
        self._network, self._where = trained, where
        self._start = [parameter.detach().clone() for parameter in trained.parameters()]
        self.gradients: list[dict[str, Tensor]] = []

    def zero_grad(self) -> None:
        """No-op, because the network zeroes its buffers."""

    def step(self) -> tuple[float, bool]:
        """Make a step; see Optimizer.step."""
        parameters = list(self._network.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:  # in the place of the weights, gradients are exported like them
            assert parameter.main_grad.dtype == torch.float64  # type: ignore[attr-defined]
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        self.gradients.append({name: tensor.clone() for name, tensor in self._network.weights.hf_tensors()})
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old - RATE * parameter.data)
        return 0.0, True

    def restore(self) -> None:
        """Restore the weights before the first step."""
        for parameter, old in zip(self._network.parameters(), self._start, strict=True):
            parameter.data.copy_(old)
        self.gradients.clear()


def in_float64(config: Config, settings: dict[str, Any]) -> Config:
    """Return a configuration with a layout, and a precision that users cannot set."""
    trainer = config.trainer.model_copy(update={**settings, "dtype": "float64"})
    return config.model_copy(update={"trainer": trainer})


def train(config: Config, folder: Path, layout: str) -> None:
    """Run every algorithm in one layout."""
    where = split(config.trainer, torch.device("cpu"), 0)
    trained = network.Network(config.trainer, folder / "model", where)
    descent = Descent(trained, where)
    policy.Network = lambda *_, **__: trained  # type: ignore[assignment, misc]
    policy.NetworkOptimizer = lambda *_: descent  # type: ignore[assignment, misc]
    figures, gradients = {}, {}
    batch = Batch(VERSION, groups(layout == "shuffled"), {})
    for name, settings in ALGORITHMS.items():
        if not runs(layout, name):
            continue
        algo = AlgoConfig.model_validate(changed(config.algo.model_dump(), settings))
        one = policy.Policy(config.model_copy(update={"algo": algo}), folder, where)
        figures[name] = [one.update(part) for part in in_parts(batch, config.trainer.batch_parts)][-1]
        steps = enumerate(descent.gradients)
        gradients.update({f"{name}/{step}/{key}": tensor for step, found in steps for key, tensor in found.items()})
        descent.restore()
    if where.exports:
        save_file(gradients, folder / f"{layout}-{where.pp_rank}.safetensors")
    if where.is_first:
        (folder / f"{layout}.json").write_text(json.dumps(figures))
    parallel_state.destroy_model_parallel()


def main(folder: Path) -> None:
    # float32 gradients, and sums that each replica holds a part of, are for training
    own = network.DistributedDataParallelConfig
    network.DistributedDataParallelConfig = lambda **_: own()  # type: ignore[assignment, misc]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = read(folder)
    for layout, settings in LAYOUTS[dist.get_world_size()].items():
        train(in_float64(config, settings), folder, layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
