"""One trainer rank of a test of adapters: python rank_lora.py FOLDER LAYOUT, under torchrun.

For each model of FOLDER/LAYOUT.json it loads FOLDER/NAME-adapters.safetensors and writes what test_lora.py compares:
log-probabilities, the gradients of the adapters, the adapters and the merged weights after one clipped update, and the
base. It asserts that the base is untouched, and that a checkpoint of the adapters restores them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.backends.cpu import megatron_shim

megatron_shim.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.token_accumulator import TokenAccumulator  # noqa: E402
from tests.integration.test_step import groups, weights  # noqa: E402

ROWS = len(weights())


def scored(network: Network, parallel: Parallel) -> Tensor:
    """Return the log-probabilities of all tokens."""
    seen = TokenAccumulator(ROWS, parallel)

    def visit(head: Head, one: Pack) -> Tensor:
        logprobs, _ = head.score(one, 1.0)
        seen.note(one.table_rows, logprobs=logprobs)
        return logprobs.sum()

    network.score(network.packs(groups()), visit)
    return seen.gather(("logprobs",))[0]["logprobs"].float()


def gradients(network: Network) -> dict[str, Tensor]:
    """Return the gradients by the names of `adapters`: they take the place of the weights, and are exported."""
    own = [(one, one.detach().clone()) for one in network.parameters() if one.requires_grad]
    for parameter, _ in own:
        parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    found = {name: tensor.clone() for name, tensor in network.weights.adapters()}
    for parameter, data in own:
        parameter.data.copy_(data)
    return found


def main(folder: Path, layout: str) -> None:
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)

    def visit(head: Head, one: Pack) -> Tensor:
        return -(weights()[one.table_rows] * head.score(one, 1.0)[0]).sum()

    for name in settings["models"]:
        network = Network(trainer, folder / name, parallel)
        given = load_file(folder / f"{name}-adapters.safetensors")
        used: set[str] = set()

        def read(key: str, shape: torch.Size, given: dict[str, Tensor] = given, used: set[str] = used) -> Tensor:
            assert given[key].shape == torch.Size(shape), key
            used.add(key)
            return given[key]

        network.weights.load_adapters(read)
        again = {key: tensor.clone() for key, tensor in network.weights.adapters()}
        assert all(tensor.equal(given[key]) for key, tensor in again.items())
        optimizer = NetworkOptimizer(trainer, network, 100)
        out = {"logprobs": scored(network, parallel)}
        with network.base():
            out["base_logprobs"] = scored(network, parallel)
        base = {key: tensor.clone() for key, tensor in network.weights.hf_tensors(merged=False)}
        frozen = [one.detach().clone() for one in network.parameters() if not one.requires_grad]
        optimizer.zero_grad()
        network.train(network.packs(groups()), visit)
        if not network.sharded:
            out |= {f"gradient {key}": tensor for key, tensor in gradients(network).items()}
        out["norm"] = torch.tensor(optimizer.step()[0])
        network.gather()
        out |= {f"after {key}": tensor.clone() for key, tensor in network.weights.adapters()}
        out |= {f"merged {key}": tensor.clone() for key, tensor in network.weights.hf_tensors()}
        out |= {f"base {key}": tensor for key, tensor in base.items()}
        still = [one.detach() for one in network.parameters() if not one.requires_grad]
        assert all(one.equal(two) for one, two in zip(frozen, still, strict=True))
        assert all(buffer.grad_data.numel() for buffer in network.wrapped[0].buffers)
        if parallel.exports:
            save_file(
                {key: tensor.contiguous() for key, tensor in out.items()},
                folder / f"{layout}-{name}-{parallel.pp_rank}.out",
            )
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
