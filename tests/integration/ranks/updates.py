"""What updates make of weights: in every layout, as torch makes them, and whatever saves memory or time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from asyncrl.algo.pack import Pack, pack
from asyncrl.config import AlgoConfig, Config, TrainerConfig, load, read
from asyncrl.extensions.offload.device_memory import MovedStates
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer import data_parallel, network, policy
from asyncrl.trainer.attention import PackedAttention
from asyncrl.trainer.head import Head
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.policy import Policy
from asyncrl.weights.export import save_hf
from tests.fakes import changed, in_parts
from tests.integration import losses
from tests.integration.ranks.joining import divided, groups_of, joined, met
from tests.integration.updates import drawn_samples, token_weights
from tests.integration.variants import of_run

Figures = dict[str, float]


def of_batch(policy: Policy, batch: Batch, parts: int) -> Figures:
    """Make the update of a batch in parts, and return the figures of the last part."""
    return [policy.update(part) for part in in_parts(batch, parts)][-1]


def weighted_loss(head: Head, one: Pack) -> Tensor:
    """Return the sum of all log-probabilities, each with a factor of its own."""
    return -(token_weights()[one.table_rows] * head.score(one, 1.0)[0].float()).sum()


# --- layouts --------------------------------------------------------------------------------------------------------


def two(name: str, folders: list[Path]) -> list[list[Figures]]:
    """Make two updates of each folder's model, with its batch and settings, and write the weights to out-NAME: they and
    the figures, which are returned, must not depend on the layout. One launch serves several models."""
    parallel, found = joined(read(folders[0]).trainer), []
    for folder in folders:
        config = read(folder)
        trained = Policy(config, folder / "model", parallel)
        for offload in getattr(trained.hooks.get("offload"), "offloads", []):
            offload.least = 0  # the model is small
        batches = [Batch(version, groups_of(folder), {}) for version in range(2)]
        found.append([of_batch(trained, batch, config.trainer.batch_parts) for batch in batches])
        save_hf(folder / f"out-{name}", folder / "model", trained.weights, parallel, config.trainer.dtype)
    return found


# --- clipping -------------------------------------------------------------------------------------------------------


def clipped(trainer: TrainerConfig, models: list[Path]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the gradient norms of three clipped updates of each model, and the weights after them: both must be those
    of torch's AdamW."""
    parallel, found = joined(trainer), []
    for model in models:
        trained = network.Network(trainer, model, parallel)
        optimizer = NetworkOptimizer(trainer, trained, 100)
        norms = []
        for split in (3, 2, 1):  # the first update has one micro-batch, later ones two
            optimizer.zero_grad()
            parts = [part for part in (drawn_samples()[:split], drawn_samples()[split:]) if part]
            trained.train([pack(part) for part in parts], weighted_loss)
            norms.append(optimizer.step()[0])
        found.append((torch.tensor(norms), {key: one.clone() for key, one in trained.weights.hf_tensors()}))
    return found


# --- settings that change no bit ------------------------------------------------------------------------------------

COUNTS = {"attention": 0, "reductions": 0, "away": 0, "activations": 0, "layers": 0}


def variants(folders: list[Path]) -> list[dict[str, dict[str, int]]]:
    """Make two updates of each folder's model with its settings, and again with each change of the trainer's settings
    in variants.json, and assert that no bit of figures and weights depends on it.

    Returns for each what ran inside backward: passes through attention, which are recomputed ones, and reductions of
    gradients; and what was in host memory during passes: tensors of the optimizer, and activations.
    """
    parallel, counts = joined(read(folders[0]).trainer), []
    counted("attention", PackedAttention, "forward")
    counted("reductions", _ParamAndGradBucketGroup, "start_grad_sync")
    for folder in folders:
        config, groups = read(folder), groups_of(folder)
        figures, weights, gradients = updated(config, folder, groups, parallel)
        assert not any(COUNTS.values())
        counts.append({})
        for name, changes in json.loads((folder / "variants.json").read_text()).items():
            other = load(changed(config.model_dump(), of_run(changes)))
            mine, my_weights, my_gradients = updated(other, folder, groups, parallel)
            counts[-1][name] = dict(COUNTS)
            differ = [key for one, two in zip(figures, mine, strict=True) for key in one if one[key] != two[key]]
            if other.trainer.overlap_grad_reduce:  # the norm is a sum over shards, and those depend on buckets
                for one, two in zip(figures, mine, strict=True):
                    assert math.isclose(one["grad_norm"], two["grad_norm"], rel_tol=1e-6)
                differ = [key for key in differ if key != "grad_norm"]
            assert not differ, f"{folder.name}, {name}: {differ} of {mine} and {figures}"
            assert all(one.equal(two) for one, two in zip(weights, my_weights, strict=True)), f"{folder.name}, {name}"
            if not other.trainer.overlap_grad_reduce:  # which shards hold a reduced gradient depends on buckets
                assert all(one.equal(two) for one, two in zip(gradients, my_gradients, strict=True)), name
    return counts


def counted(kind: str, owner: Any, name: str) -> None:
    """Count the calls of a method while autograd runs a backward pass in this thread."""
    own = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        COUNTS[kind] += torch._C._current_graph_task_id() != -1
        return own(*args, **kwargs)

    setattr(owner, name, method)


def counted_away(policy: Policy) -> None:
    """Count the tensors of the optimizer that have no memory while passes with gradient run."""
    own = policy.network.train

    def train(*args: Any, **kwargs: Any) -> None:
        COUNTS["away"] += sum(not tensor.untyped_storage().nbytes() for tensor in policy.optimizer.states())
        own(*args, **kwargs)

    policy.network.train = train  # type: ignore[method-assign]


def counted_activations(offload: Any) -> None:
    """Count the bytes of activations that come back to the device in backward, and the layers of a micro-batch that are
    on the device and in host memory when forward is about to copy the next one."""
    load, send = offload._load, offload._send

    def loaded(layer: Any) -> None:
        COUNTS["activations"] += sum(layer.host[n].nbytes for n, one in enumerate(layer.device) if one is None)
        load(layer)

    def sent(layer: Any) -> None:
        send(layer)
        earlier, held = layer.before, 0
        while earlier:
            held += any(one is not None and earlier.host[n] is not None for n, one in enumerate(earlier.device))
            earlier = earlier.before
        COUNTS["layers"] = max(held, COUNTS["layers"])

    offload._load, offload._send = loaded, sent


def updated(
    config: Config, folder: Path, groups: list[Group], parallel: Parallel
) -> tuple[list[Figures], list[Tensor], list[Tensor]]:
    """Return the figures of two updates, and weights and gradients after them."""
    trained = Policy(config, folder / "model", parallel)
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    for offload in getattr(trained.hooks.get("offload"), "offloads", []):
        offload.stand_in, offload.least = True, 0
        counted_activations(offload)
    if isinstance(trained.optimizer.memory, MovedStates):
        trained.optimizer.memory.memory._stand_in = True
        counted_away(trained)
    figures = [of_batch(trained, Batch(version, groups, {}), config.trainer.batch_parts) for version in range(2)]
    parameters = list(trained.network.parameters())
    gradients = [one.main_grad.clone() for one in parameters if one.requires_grad]  # type: ignore[attr-defined]
    return figures, [one.detach().clone() for one in parameters], gradients


# --- losses in float64 ----------------------------------------------------------------------------------------------

RATE = 2.0  # moves the policy beyond its clip in one step
Losses = dict[str, tuple[dict[str, Figures], dict[str, Tensor]]]
"""For each layout figures by algorithm, and the gradients of an exporting rank by algorithm, step and HF name."""


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


def in_float64(
    folder: Path, layouts: dict[int, dict[str, dict[str, Any]]]
) -> Iterator[tuple[str, Config, Parallel, Descent]]:
    """Take each layout for as many processes as there are in turn. Yields its name, a configuration with it and a
    precision that users cannot set, and the optimizer of all policies that are built in it, which share one network."""
    met()
    own = data_parallel.DistributedDataParallelConfig
    # float32 gradients, and sums that each replica holds a part of, are for training
    data_parallel.DistributedDataParallelConfig = lambda **_: own()  # type: ignore[assignment, misc]
    config = read(folder)
    for layout, settings in layouts[dist.get_world_size()].items():
        trainer = config.trainer.model_copy(update={**settings, "dtype": "float64"})
        with divided(trainer) as where:
            trained = network.Network(trainer, folder / "model", where)
            descent = Descent(trained, where)
            policy.Network = lambda *_, trained=trained, **__: trained  # type: ignore[assignment, misc]
            policy.NetworkOptimizer = lambda *_, descent=descent: descent  # type: ignore[assignment, misc]
            yield layout, config.model_copy(update={"trainer": trainer}), where, descent


def every_loss(folder: Path) -> Losses:
    """Train the folder's model with every algorithm, in each layout of losses.LAYOUTS: figures and gradients must not
    depend on it. The policy, the network and Megatron's schedules run as they are; their optimizer, which knows no
    float64, is one that descends by the gradient."""
    found: Losses = {}
    for layout, config, where, descent in in_float64(folder, losses.LAYOUTS):
        figures: dict[str, Figures] = {}
        gradients: dict[str, Tensor] = {}
        batch = Batch(losses.VERSION, losses.groups(layout == "shuffled"), {})
        for name, settings in losses.ALGORITHMS.items():
            if not losses.runs(layout, name):
                continue
            algo = AlgoConfig.model_validate(changed(config.algo.model_dump(), settings))
            one = policy.Policy(config.model_copy(update={"algo": algo}), folder / "model", where)
            figures[name] = of_batch(one, batch, config.trainer.batch_parts)
            for step, of_step in enumerate(descent.gradients):
                gradients |= {f"{name}/{step}/{key}": tensor for key, tensor in of_step.items()}
            descent.restore()
        found[layout] = figures, gradients if where.exports else {}
    return found
