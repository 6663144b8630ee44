"""Routing replay: routers use experts that were chosen before, with their own scores of them.

R3   arXiv 2510.11370: the engine's experts, in every pass of the policy
R2   the experts that this trainer chose in the pass over the whole batch, in the optimizer steps that follow it

A router computes its scores and its own choice as usual; only the choice is replaced. The expert weights, their
normalization and scaling are therefore the model's, the gradient flows through them, and load-balancing losses see the
router's own choice. Each rank keeps the layers of its pipeline stage, for all tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.extension import TrainerHooks
from asyncrl.extensions.routing_replay.encoding import RoutingShape
from asyncrl.extensions.routing_replay.index import RoutingReplayIndex, engine_routes, with_keys
from asyncrl.parallel import Parallel
from asyncrl.schema import Group
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.network import Network

Kind = Literal["R2", "R3"]
PIECE = 1 << 26
"""Bytes of routes that ranks exchange at once."""


class RouterReplay:
    """The expert choice of one router. Replaces Megatron's own RouterReplay (megatron-core 0.16.1,
    transformer/moe/router_replay.py), which knows neither packs nor tokens without recorded experts."""

    def __init__(self, device: torch.device) -> None:
        self.given: tuple[Tensor, Tensor] | None = None  # experts [n, k] int64, and which rows are known [n] bool
        self.own = torch.empty(0)  # the router's own choice in its last pass, [n, k]
        self.compared = torch.zeros(3, dtype=torch.float64, device=device)  # tokens that differ, overlap, tokens

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute scores [n, experts] -> scores and numbers of the chosen experts, [n, k]. Group limits apply only to
        the router's own choice."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.own = own
        if self.given is None:
            return values, own
        experts, known = self.given
        chosen = torch.where(known[:, None], experts, own)
        if torch.is_grad_enabled():
            self._compare(own, chosen, known)
        return scores.gather(1, chosen), chosen

    def _compare(self, own: Tensor, chosen: Tensor, known: Tensor) -> None:
        """Compare the choices as sets, ignoring order. The counts stay on the device."""
        same = (own[:, :, None] == chosen[:, None, :]).any(2).sum(1)
        k = own.shape[1]
        differs, overlap = ((same < k) & known).sum(), (same * known).sum().double() / k
        self.compared += torch.stack([differs.double(), overlap, known.sum().double()])


class RoutingReplay(TrainerHooks):
    """Routing replay for all routers of a network on this rank."""

    def __init__(self, kind: Kind, network: Network, shape: RoutingShape, parallel: Parallel) -> None:
        """Make the routers of every later pass ask this object for their experts."""
        self.starts = kind == "R2"
        network.around_forward.append(self.around)
        self._kind = kind
        self._shape = shape
        self._parallel = parallel
        self._choices: dict[GPTModel, list[RouterReplay]] = {}
        self._places: dict[GPTModel, slice] = {}  # range of each chunk's layers in the routes
        self._layers: list[int] = []  # indices of this rank's routers among the layers with experts, chunk by chunk
        for chunk in network.chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._choices[chunk] = [RouterReplay(parallel.device) for _ in routers]
            self._places[chunk] = slice(len(self._layers), len(self._layers) + len(routers))
            self._layers += [shape.sparse.index(router.layer_number - 1) for router in routers]
            for router, choice in zip(routers, self._choices[chunk], strict=True):
                router.router_replay = choice
        self._routes = RoutingReplayIndex.empty(0, len(self._layers), shape)
        self._mode: Literal["own", "record", "replay"] = "own"

    # -- a batch -------------------------------------------------------------------------------------------

    def samples(self, groups: Sequence[Group], samples: Groups, *, first: bool = True) -> Groups:
        """Start a new batch, or its next part, if this is not the first. Return its samples with the keys of their
        tokens. Raises ValueError if the engines report the experts of another model."""
        keyed, count = with_keys(samples)
        if self._kind == "R3":
            self._routes = engine_routes(groups, keyed, count, self._shape, self._layers)
        else:
            self._routes = RoutingReplayIndex.empty(count, len(self._layers), self._shape)
        for choice in self._every() if first else ():
            choice.compared.zero_()
        return keyed

    @contextmanager
    def passes(self, *, start: bool = False) -> Iterator[None]:
        """Mark the passes inside the block as the policy's. (The reference model has other weights and chooses its own
        experts.) R2 records the experts of a pass over the whole batch, which has no gradient."""
        self._mode = "record" if self._kind == "R2" and start else "replay"
        try:
            yield
            if self._mode == "record":
                self._exchange()
        finally:
            self._mode = "own"

    def after_update(self, version: int) -> dict[str, float]:
        """Return how far the routers' own choice differs from the replayed one, in the passes with gradient.
        Collective."""
        totals = torch.zeros(3, dtype=torch.float64, device=self._parallel.device)
        for choice in self._every():
            totals += choice.compared
        if dist.get_world_size() > 1:
            dist.all_reduce(totals)
        differs, overlap, compared = totals.tolist()
        return {"router/differs": differs / compared, "router/overlap": overlap / compared} if compared else {}

    # -- a pass --------------------------------------------------------------------------------------------

    @contextmanager
    def around(self, chunk: GPTModel, pack: Pack, gradient: bool) -> Iterator[Callable[[], None]]:
        """Yield what sets the replayed experts, and record those that are chosen inside the block."""
        yield self._before(chunk, pack)
        self._after(chunk, pack)

    def _before(self, chunk: GPTModel, pack: Pack) -> Callable[[], None]:
        """Return what sets the replayed experts, before a chunk runs the pack and before it recomputes a part of it."""
        choices, layers = self._choices[chunk], self._places[chunk]
        given: list[tuple[Tensor, Tensor] | None] = [None for _ in choices]
        if self._mode == "replay" and pack.keys is not None and choices:
            experts, known = self._routes.get(self._mine(pack.keys, chunk), layers)
            experts, known = experts.to(self._parallel.device).long(), known.to(self._parallel.device)
            given = [(experts[:, place], known) for place in range(len(choices))]

        def route() -> None:
            for choice, experts in zip(choices, given, strict=True):
                choice.given = experts

        return route

    def _after(self, chunk: GPTModel, pack: Pack) -> None:
        """Record the chosen experts, after a chunk has run the pack."""
        choices = self._choices[chunk]
        if self._mode == "record" and pack.keys is not None and choices:
            chosen = torch.stack([choice.own for choice in choices], 1).to(self._routes.experts.dtype).cpu()
            self._routes.put(self._mine(pack.keys, chunk), chosen, self._places[chunk])

    def _mine(self, keys: Tensor, chunk: GPTModel) -> Tensor:
        """Return the keys of the tokens that this rank's routers see: under sequence parallelism, its equal part of the
        row."""
        if not chunk.config.sequence_parallel:
            return keys
        return keys.chunk(self._parallel.tp)[self._parallel.tp_rank]

    def _every(self) -> Iterator[RouterReplay]:
        for choices in self._choices.values():
            yield from choices

    # -- between ranks -------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Combine what the ranks of this stage recorded, on all of them: each token's experts come from the first rank
        that has them."""
        group = self._parallel.stage_group
        if group is None or dist.get_world_size(group) == 1 or not self._layers:
            return
        routes, rank, device = self._routes, self._parallel.rank, self._parallel.device
        nobody = dist.get_world_size()
        owner = torch.where(routes.known, rank, nobody).to(device, torch.int32)
        dist.all_reduce(owner, dist.ReduceOp.MIN, group=group)
        owner = owner.cpu()
        routes.experts[owner != rank] = 0
        routes.known = owner < nobody
        data = routes.experts.view(torch.uint8).flatten()  # only one rank's bytes are nonzero, so the sum equals them
        for piece in data.split(PIECE):
            moved = piece.to(device)
            dist.all_reduce(moved, group=group)
            piece.copy_(moved)
