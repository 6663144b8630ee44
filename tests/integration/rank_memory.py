"""One trainer rank of test_memory.py: python rank_memory.py FOLDER ROWS VOCABULARY, under torchrun. It
reports the bytes that it holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack  # noqa: E402
from asyncrl.algo.samples import Sample  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.extensions.lora.transformation import transformation_of  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402


def main(folder: Path, rows: int, vocab: int) -> None:
    trainer = TrainerConfig.model_validate(json.loads((folder / "trainer.json").read_text()))
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)
    network = Network(trainer, folder / "model", parallel, transformation=transformation_of(trainer.lora))
    optimizer = NetworkOptimizer(trainer, network, 100)
    shards = list(optimizer.shards())
    every = {id(one): one for one in network.parameters()}.values()
    parameters = [one for one in every if one.requires_grad]
    apart = [one.master for one in shards if one.master.dtype != one.parameter.dtype]
    told = {
        "weights": sum(one.nbytes for one in parameters),
        "frozen base": sum(one.nbytes for one in (*every, *network.packed()) if not one.requires_grad),
        "gradients": sum(one.main_grad.nbytes for one in parameters),  # type: ignore[attr-defined]
        "masters": sum(one.nbytes for one in apart),
        "moments": sum(moment.nbytes for one in shards for moment in one.moments.values()),
        "activations": kept_by_forward(network, rows, vocab),
    }
    (folder / f"told-{parallel.rank}.json").write_text(json.dumps(told))


def kept_by_forward(network: Network, rows: int, vocab: int) -> int:
    """Return the bytes of all memory that autograd keeps at the end of forward, except the parameters, and those of the
    largest unit that backward recomputes."""
    one = Sample(
        [i % vocab for i in range(rows)], [(i + 1) % vocab for i in range(rows)], [True] * rows, number=0, first_row=0
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, Tensor] = {}  # by address, held so that none is used again
    again: list[dict[int, Tensor]] = [{}]  # the same, of each unit in backward
    forward: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        address, in_backward = tensor.untyped_storage().data_ptr(), torch._C._current_graph_task_id() != -1
        if address not in own and not (in_backward and address in kept):
            (again[-1] if in_backward else kept)[address] = tensor
        return tensor

    begin = random._set_checkpointing
    random._set_checkpointing = lambda: (again.append({}), begin())

    def visit(head: Head, _: Pack) -> Tensor:
        forward.append(sizes(kept))
        return head.hidden.float().sum()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network.train(network.packs([[one]] * network._parallel.dp), visit)
    return forward[0] + max(sizes(unit) for unit in again)


def sizes(tensors: dict[int, Tensor]) -> int:
    """Return the bytes of all these tensors' storages; a discarded one has none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
