"""One trainer rank of a test of adapters: python rank_lora.py FOLDER LAYOUT, under torchrun.

For each model of FOLDER/LAYOUT.json it loads FOLDER/NAME-adapters.safetensors and writes what test_lora.py compares:
log-probabilities, the gradients of the adapters, the adapters and the merged weights after one clipped update, and the
base. It asserts that the base is untouched, and that checkpoints of any layout restore the adapters.
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
from asyncrl.checkpoints.torch_dist import write_frame  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer import sharded  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.sharded import ShardedState  # noqa: E402
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


def restored(network: Network, state: ShardedState, folder: Path) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint, which is loaded over others."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.fill_(7)
    state.load(folder)
    return {name: tensor.clone() for name, tensor in network.weights.adapters()}


def check_checkpoints(network: Network, optimizer: NetworkOptimizer, folder: Path, layout: str, name: str) -> None:
    """Assert that a checkpoint of this layout restores every bit of the adapters, and one of a single rank the same
    values."""
    state, before = ShardedState(network, optimizer), dict(network.weights.adapters())
    before = {key: tensor.clone() for key, tensor in before.items()}
    (folder / f"{layout}-{name}-checkpoint").mkdir(exist_ok=True)
    sharded.write(folder / f"{layout}-{name}-checkpoint", list(state.written()), None)
    dist.barrier()
    write_frame(folder / f"{layout}-{name}-checkpoint", 1)
    of_one = restored(network, state, folder / f"single-{name}-checkpoint")
    mine = restored(network, state, folder / f"{layout}-{name}-checkpoint")
    for key, tensor in before.items():
        assert mine[key].equal(tensor), key
        torch.testing.assert_close(of_one[key], tensor, rtol=0, atol=0.02 if layout == "bfloat16" else 1e-4)


def main(folder: Path, layout: str) -> None:
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)

    def visit(head: Head, one: Pack) -> Tensor:
        return -(weights()[one.table_rows] * head.score(one, 1.0)[0]).sum()

    for name, targets in settings["models"].items():
        lora = trainer.lora.model_copy(update={"targets": targets})
        network = Network(trainer.model_copy(update={"lora": lora}), folder / name, parallel)
        out = {f"start {key}": tensor.clone() for key, tensor in network.weights.adapters()}
        given = load_file(folder / f"{name}-adapters.safetensors")
        used: set[str] = set()

        def read(key: str, shape: torch.Size, given: dict[str, Tensor] = given, used: set[str] = used) -> Tensor:
            assert given[key].shape == torch.Size(shape), key
            used.add(key)
            return given[key]

        network.weights.load_adapters(read)
        again = {key: tensor.clone() for key, tensor in network.weights.adapters()}
        dtype = getattr(torch, trainer.dtype)
        assert all(tensor.equal(given[key].to(dtype).float()) for key, tensor in again.items())
        optimizer = NetworkOptimizer(trainer, network, 100)
        if optimizer.memory:
            optimizer.memory._stand_in = True
        if network.offload:
            network.offload.stand_in, network.offload.least = True, 0
        out["logprobs"] = scored(network, parallel)
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
        if not network.sharded:  # which pads its buffers
            trained = sum(one.numel() for one in network.parameters() if one.requires_grad)
            assert sum(one.numel() for one in network.gradients()) == trained
        if not trainer.lora.dropout:
            check_checkpoints(network, optimizer, folder, layout, name)
        if parallel.exports:
            save_file(
                {key: tensor.contiguous() for key, tensor in out.items()},
                folder / f"{layout}-{name}-{parallel.pp_rank}.out",
            )
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
