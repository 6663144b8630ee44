"""What a trainer rank holds in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import Sample
from asyncrl.config import TrainerConfig
from asyncrl.extensions.lora.transformation import transformation_of
from asyncrl.trainer.head import Head
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer
from tests.integration.ranks.joining import joined


def held(trainer: TrainerConfig, model: Path, rows: int, vocab: int) -> dict[str, int]:
    """Return the bytes that this rank holds, by what they are for, which must be those that the planner says."""
    network = Network(trainer, model, joined(trainer), transformation=transformation_of(trainer.lora))
    optimizer = NetworkOptimizer(trainer, network, 100)
    shards = list(optimizer.shards())
    every = {id(one): one for one in network.parameters()}.values()
    parameters = [one for one in every if one.requires_grad]
    apart = [one.master for one in shards if one.master.dtype != one.parameter.dtype]
    return {
        "weights": sum(one.nbytes for one in parameters),
        "frozen base": sum(one.nbytes for one in (*every, *network.packed()) if not one.requires_grad),
        "gradients": sum(one.main_grad.nbytes for one in parameters),  # type: ignore[attr-defined]
        "masters": sum(one.nbytes for one in apart),
        "moments": sum(moment.nbytes for one in shards for moment in one.moments.values()),
        "activations": kept_by_forward(network, rows, vocab),
    }


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
