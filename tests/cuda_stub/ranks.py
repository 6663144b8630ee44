"""The other ranks of a layout, of which one process runs one: collectives that do nothing, the shapes that pipeline
neighbors send, and the number of tokens that each routed expert gets."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.algo.pack import Pack
from asyncrl.config import TrainerConfig
from tests.cuda_stub.fake import SELECTED, tell

PASSES: list[list[int]] = []
"""The tokens of each micro-batch of each pass over a network."""


def be_rank(rank: int, world: int) -> None:
    """Make torch.distributed this rank of a group in which nothing is sent."""
    from megatron.core.distributed import param_and_grad_buffer

    start, new_group = dist.init_process_group, dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | ({"backend": "fake"} if kwargs.get("backend") else {}))

    def all_gather_object(out: list[Any], mine: Any, group: Any = None) -> None:
        out[:] = [mine] * len(out)

    @contextlib.contextmanager
    def coalescing(*_: Any, **__: Any) -> Iterator[Any]:
        yield types.SimpleNamespace(wait=lambda: None)

    dist.init_process_group = lambda *_, **__: start("fake", rank=rank, world_size=world, store=FakeStore())
    dist.new_group, dist.all_gather_object = new_fake_group, all_gather_object
    dist.broadcast_object_list = dist.barrier = lambda *_, **__: None
    param_and_grad_buffer._coalescing_manager = coalescing  # torch's own sends what no fake tensor supports


def classes(trainer: TrainerConfig) -> list[int]:
    """Return one rank of each class: of the first, a middle and the last stage, the first rank and one whose other
    coordinates (tensor, context, expert, data) are not 0. Only the first rank of a middle stage."""
    stage = trainer.world_size // trainer.pipeline_parallel
    other = 1 % trainer.tensor_parallel  # dense ranks are ordered by tensor, context, data
    other += trainer.tensor_parallel * (1 % trainer.context_parallel)
    other += trainer.tensor_parallel * trainer.context_parallel * (trainer.data_parallel - 1)
    last = trainer.pipeline_parallel - 1
    ranks = {0, other, last * stage, last * stage + other}
    return sorted(ranks | ({stage} if last > 1 else set()))


# -- pipeline ----------------------------------------------------------------------------------------------


class Arrivals:
    """The shapes of what the neighbors of a stage send during one pass over packs, in the order of Megatron's
    schedules."""

    def __init__(self, packs: list[Pack], network: Any) -> None:
        p, config = network._parallel, network.config
        chunks, rows = len(network.wrapped), p.tp if config.sequence_parallel else 1
        shapes = [((pack.rows[1] - pack.rows[0]) // rows, 1, config.hidden_size) for pack in packs]
        order = [
            (k // (p.pp * chunks) * p.pp + k % p.pp, k % (p.pp * chunks) // p.pp) for k in range(len(packs) * chunks)
        ]
        last = chunks - 1
        self._forward = [shapes[n] for n, chunk in order if p.pp_rank or chunk]
        self._backward = [shapes[n] for n, chunk in order if not p.is_last_stage or chunk]  # chunks from last to first
        assert last >= 0

    def of(self, *, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        """Return the next shapes."""
        return self._forward.pop(0) if recv_prev else None, self._backward.pop(0) if recv_next else None

    def check(self, *, forward_only: bool) -> None:
        """Raise unless everything that the neighbors send was received."""
        left = len(self._forward) + (0 if forward_only else len(self._backward))
        assert not left, f"{left} tensors of the neighbors were never received"


def answer_shapes() -> None:
    """Answer Megatron's exchange of shapes, whose values are not known on fake tensors."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from asyncrl.trainer.network import Network

    exchange, run, expected = P2PCommunicator._communicate_shapes, Network._run, []

    def communicate_shapes(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        exchange(self, send_next, send_prev, recv_prev, recv_next)
        return expected[-1].of(recv_prev=recv_prev, recv_next=recv_next)

    def run_with_arrivals(self: Network, packs: list[Pack], visit: Any, *, forward_only: bool, **how: Any) -> None:
        PASSES.append([pack.num_tokens for pack in packs])
        expected.append(Arrivals(packs, self))
        run(self, packs, visit, forward_only=forward_only, **how)
        if self._parallel.pp > 1:
            expected.pop().check(forward_only=forward_only)

    P2PCommunicator._communicate_shapes = communicate_shapes  # type: ignore[method-assign]
    Network._run = run_with_arrivals  # type: ignore[method-assign]


# -- routed experts ----------------------------------------------------------------------------------------


def loads(kind: str, total: int, experts: int) -> list[int]:
    """Return the number of a rank's choices that each expert gets: `even`, or `skewed`: half go to the first expert
    and none to the last."""
    if kind == "even":
        return [total // experts + (i < total % experts) for i in range(experts)]
    first = total // 2
    return [first, *loads("even", total - first, experts - 2), 0]


def route(kind: str) -> None:
    """Tell Megatron's token dispatcher how many tokens go where. All ranks choose alike."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, permute = dispatcher.preprocess, token_dispatcher.permute

    def told(self: Any, routing_map: Tensor) -> Tensor:
        found = preprocess(self, routing_map)
        total = routing_map.shape[0] * self.config.moe_router_topk
        mine = torch.tensor(loads(kind, total, self.num_experts))
        first, count = self.local_expert_indices[0], self.num_local_experts
        here = mine[first : first + count].expand(self.tp_size, self.ep_size, count)
        if self.ep_size > 1 or self.tp_size > 1:
            tell(self.input_splits, mine.view(self.ep_size, count).sum(1))
            tell(self.output_splits, here.sum(2)[self.tp_rank])
            tell(self.output_splits_tp, here.sum(2).sum(1))
        if count > 1:
            tell(self.num_global_tokens_per_local_expert, here.reshape(-1, count))
        return tell(found, here.sum((0, 1)))

    def selecting(*args: Any, num_out_tokens: int, **kwargs: Any) -> Any:
        SELECTED.append(num_out_tokens)
        try:
            return permute(*args, num_out_tokens=num_out_tokens, **kwargs)
        finally:
            SELECTED.pop()

    dispatcher.preprocess, token_dispatcher.permute = told, selecting  # type: ignore[method-assign]
