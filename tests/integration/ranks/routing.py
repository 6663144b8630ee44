"""What updates make of replayed routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import Sample, build_samples
from asyncrl.config import Config, read
from asyncrl.extensions.routing_replay.encoding import shape_of, unpacked
from asyncrl.extensions.routing_replay.routers import RoutingReplay
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer.encoder import encoder_of
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import packs_of_rank
from asyncrl.trainer.network import Network
from asyncrl.trainer.operations import costs_of
from asyncrl.trainer.policy import Policy
from tests.integration.ranks.joining import groups_of, joined, with_settings

Figures = dict[str, Any]


def gradient(network: Network, packs: list[Pack], parallel: Parallel) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of this rank (on the last stage) and the gradient of every parameter."""
    losses = [torch.zeros(())]

    def visit(head: Head, pack: Pack) -> Tensor:
        logprobs, _ = head.score(pack, 1.0)
        loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
        losses.append(loss.detach())
        return loss

    network.train(packs, visit)
    return torch.stack(losses).sum(), [parameter.main_grad.clone() for parameter in network.parameters()]


def own_routing_changes_nothing(config: Config, groups: list[Group], folder: Path, parallel: Parallel) -> Figures:
    """Record routing in small micro-batches of the whole batch, and replay it in large ones in another order."""
    model = folder / "model"
    network = Network(config.trainer, model, parallel, encoder=encoder_of(config, model, parallel))
    routing = RoutingReplay("R2", network, shape_of(network.hf), parallel)
    samples = build_samples(groups)
    samples = routing.samples(groups, network.encoder.begin(groups, samples))
    small = with_settings(config, trainer={"micro_batch_tokens": 40}).trainer
    with torch.no_grad(), routing.passes(start=True):
        packs = packs_of_rank(samples, small, parallel, costs_of(network.hf), network.encoder.placed)
        network.score(packs, lambda head, _: head.hidden.sum())
    assert bool(routing._routes.known.all())
    assert not groups[0].images or routing._routes.known.numel() > sum(len(group.prompt_ids) for group in groups)
    packs = network.packs(samples[::-1])
    loss, gradients = gradient(network, packs, parallel)
    with routing.passes():
        again, replayed = gradient(network, packs, parallel)
    figures = routing.after_update(1)
    assert loss.equal(again), f"{loss} {again}"
    for one, other in zip(gradients, replayed, strict=True):
        assert one.equal(other)
    return figures


def given_experts_are_used(policy: Policy, groups: list[Group], samples: list[list[Sample]]) -> list[int]:
    """Check in every further pass with gradient that routers used what the samples say.

    Return the number of comparisons, which grows.
    """
    network, shape, compared = policy.network, shape_of(policy.hf), [0]
    told = {}
    for group, siblings in zip(groups, samples, strict=True):
        for trajectory, sample in zip(group.trajectories, siblings, strict=True):
            for routing in (group.token_rows, *(turn.completion.token_rows for turn in trajectory.turns)):
                for place, row in enumerate(unpacked(routing.rows, shape)):
                    told.setdefault(int(sample.keys[routing.start + place]), torch.from_numpy(row.astype("i8")))
    maps: dict[TopKRouter, Tensor] = {}
    for chunk in network.chunks:
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
            router.register_forward_hook(lambda router, _, out: maps.update({router: out[1]}))

    @contextmanager
    def checked(chunk: Any, pack: Pack, gradient: bool) -> Iterator[Callable[[], None]]:
        yield lambda: None
        check(chunk, pack)

    def check(chunk: Any, pack: Pack) -> None:
        keys = pack.keys if pack.keys is not None and torch.is_grad_enabled() else torch.zeros(0)
        parallel = policy.parallel
        size = len(keys) // parallel.tp if chunk.config.sequence_parallel else len(keys)
        mine = keys[size * parallel.tp_rank :][:size].tolist() if chunk.config.sequence_parallel else keys.tolist()
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
            layer = shape.sparse.index(router.layer_number - 1)
            for row, key in enumerate(mine):
                if key in told:
                    used = maps[router][row].nonzero()[:, 0]
                    assert used.equal(told[key][layer].sort().values), (layer, row, used, told[key][layer])
                    compared[0] += 1

    network.around_forward.append(checked)
    return compared


def _routing(policy: Policy) -> RoutingReplay:
    return next(hooks for hooks in policy.hooks.values() if isinstance(hooks, RoutingReplay))


def updates(config: Config, groups: list[Group], folder: Path, parallel: Parallel, kind: str) -> Figures:
    """Train two batches. Under R3, compare the experts that routers used with those of the samples."""
    policy = Policy(with_settings(config, routing_replay={"kind": kind}), folder / "model", parallel)
    compared = [1]
    if kind == "R3":
        compared = given_experts_are_used(policy, groups, _routing(policy).samples(groups, build_samples(groups)))
    began = time.monotonic()
    figures = [policy.update(Batch(version, groups, {})) for version in range(2)]
    assert compared[0]
    return {"figures": figures, "compared": compared[0], "seconds": time.monotonic() - began}


def replayed(folder: Path, name: str) -> Figures:
    """Return the figures of every check that NAME asks for: a replay of the policy's own routing changes no bit, and
    routers use the experts that the groups of FOLDER name. What must hold on each rank is asserted."""
    config = read(folder)
    parallel = joined(config.trainer)
    groups = groups_of(folder)
    found: Figures = {}
    if name.startswith("engine"):
        for kind in ("none", "R3"):
            found[kind] = updates(config, groups, folder, parallel, kind)
    else:
        found["own"] = own_routing_changes_nothing(config, groups, folder, parallel)
        two_steps = with_settings(config, algo={"mini_batches": 2, "epochs": 2})
        for kind in ("none", "R2") if any(group.images for group in groups) else ("none", "R2", "R3"):
            found[kind] = updates(two_steps, groups, folder, parallel, kind)
    return found
