"""Parallel layouts of a model's engines and trainer that fit its GPUs, and what their communication costs. Pure.

    engine      2 all-reduces per layer and step, each base + 2 (n - 1) hop + 2 (n - 1)/n bytes / link
    tensor      a gather and a scatter in each pass through a block (attention, dense MLP, shared expert), of `hidden`
                numbers for each token; and in the backward pass a second gather, and of the three two beside products
    experts     4 exchanges per sparse layer and token, of `hidden` numbers for each expert that it selects
    pipeline    (p - 1)/m of the time idle, with m micro-batches (arXiv 2104.04473, section 2.2); activations and their
                gradients sent between stages
    replicas    per step: gradients reduced in float32 and weights gathered in bfloat16

Recomputing activations repeats the forward pass, with its gather, its scatter and its exchanges. Bandwidths are those
of `Hardware`. What overlaps with computation is what Megatron 0.16.1 overlaps under the settings of asyncrl:

    tensor      in the backward pass, at the first matrices of a block: the second gather of the input with the product
                for the input's gradient, and the scatter of that gradient with the product for the weights'
                (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; Transformer Engine's layers
                do the same). Nothing else: tp_comm_overlap cannot be set (docs/parallelism.md). Routed experts are
                not divided over these ranks, so that they are no such block (moe/token_dispatcher.py)
    experts     nothing: overlap_moe_expert_parallel_comm is refused
    pipeline    nothing without virtual stages: overlap_p2p_comm is off (trainer/network.py)
    replicas    nothing by default: trainer.overlap_grad_reduce and overlap_param_gather are off, and the weights are
                gathered at once in any case, because they are published next

Nothing was measured.

Not searched: context parallelism, virtual pipeline stages, tensor parallelism of experts, and engines that are divided
otherwise than by tensor parallelism, or are quantized.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.extensions.plan import memory, sizing
from asyncrl.extensions.plan.activations import Recompute, Training
from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.shapes import FLOAT, ParallelLayout, Shape, parameters
from asyncrl.extensions.plan.sizing import Hardware, Publish
from asyncrl.extensions.plan.tensors import BYTES, Weight

BASE, HOP = 3.6e-6, 0.47e-6
"""Seconds of a small all-reduce, and of each step of its ring over NVLink: the figures with which NCCL chooses its
algorithms (ring, LL; src/graph/tuning.cc at 01afd20)."""
FIRST = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "q_b_proj.weight",
    "kv_b_proj.weight",
)
"""Ends of the names of the first matrices of a block, whose outputs are divided over tensor-parallel ranks."""
DTYPE, BUCKET, LOGIT_ROWS = "bfloat16", 512 << 20, 1024
"""What a model is planned with: number format, bytes of a publish's bucket, rows of logits."""
MOST_STAGES = 16
MOST_GPUS = 64
"""Largest number of GPUs for one copy of the weights."""


def tensor_degrees(hf: dict[str, Any], *, trainer: bool) -> list[int]:
    """Return the degrees of tensor parallelism that divide a model's heads, as launch/checks/model.py requires."""
    heads = hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads", heads)
    rows = (heads + 2 * groups) * (hf.get("head_dim") or hf["hidden_size"] // heads)
    found = [d for d in range(1, heads + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0)]
    return [d for d in found if rows % d == 0] if trainer else found


def check_degree(field: str, degree: int, hf: dict[str, Any], *, trainer: bool) -> None:
    """Raise ConfigError for a degree of tensor parallelism that does not divide the heads."""
    allowed = tensor_degrees(hf, trainer=trainer)
    if degree not in allowed:
        heads = hf["num_attention_heads"]
        what = f"{heads} attention heads and {hf.get('num_key_value_heads', heads)} key-value heads"
        raise ConfigError(field, degree, f"Must divide the model's {what}: one of {', '.join(map(str, allowed))}.")


def communicating(engine: EngineShape, shape: Shape, tensor: int, hardware: Hardware) -> EngineShape:
    """Return the speed of an engine whose ranks reduce after attention and after the MLP of each layer."""
    if tensor == 1:
        return engine
    reduced = 2 * (tensor - 1) / tensor * shape.hidden * BYTES[DTYPE] / (_link(tensor, hardware) * hardware.share)
    return replace(
        engine,
        per_token=engine.per_token + 2 * shape.layers * (BASE + 2 * (tensor - 1) * HOP),
        per_request=engine.per_request + 2 * shape.layers * reduced,
    )


def _link(ranks: int, hardware: Hardware) -> float:
    return hardware.inside if ranks <= hardware.per_machine else hardware.between


@dataclass(frozen=True)
class TrainerSpeed:
    """Speed of a trainer with a layout."""

    rate: float
    """Tokens per second of a GPU."""
    reduce: float
    """Seconds per step in which replicas exchange gradients and weights."""


@dataclass(frozen=True)
class Trainer:
    """A layout of the trainer with the number of its replicas left open, and what it takes to fit."""

    layout: ParallelLayout
    training: Training
    least: int
    """Smallest number of replicas that fits."""

    @property
    def copy(self) -> int:
        """Return the GPUs that hold the weights once."""
        return self.layout.tensor * self.layout.pipeline

    def on(self, gpus: int) -> ParallelLayout | None:
        """Return the layout on this many GPUs; None if they are no whole number of replicas, or it does not fit."""
        data, rest = divmod(gpus, self.copy)
        if rest or data < self.least or self.layout.tensor * data % self.layout.expert:
            return None
        return replace(self.layout, data=data)


class TrainerLayouts:
    """The layouts of a model's trainer that fit."""

    def __init__(self, hf: dict[str, Any], shape: Shape, weights: Sequence[Weight], hardware: Hardware) -> None:
        """Prepare the search; `weights` is a result of shapes.counted. `merged` has a layer's experts as one."""
        self._hf, self._shape, self._weights, self._hardware = hf, shape, weights, hardware
        self.merged, self._count = _merged(weights), parameters(weights)
        self._each = 1 / sizing.train_rate(self.merged, shape, hardware)  # seconds of a GPU for a token
        self._sent: dict[tuple[ParallelLayout, bool], Publish] = {}

    @property
    def sparse(self) -> bool:
        """Return whether the model has routed experts."""
        return self._shape.experts > 0

    def fitting(
        self, most: int, longest: int, room: float, typed: Sequence[int] = (), *, overlap: bool
    ) -> list[Trainer]:
        """Return every layout that fits on `most` GPUs, or only the typed one: tensor, pipeline and expert parallelism.
        A micro-batch has `longest` tokens, and a GPU `room` bytes."""
        found = []
        for tensor, pipeline, expert in [tuple(typed)] if typed else self._degrees():
            for recompute in ("none", "full"):
                training = Training(
                    DTYPE,
                    longest,
                    LOGIT_ROWS,
                    bucket=0 if overlap else BUCKET,  # 0: all of them
                    fused_norms=True,
                    recompute=Recompute(recompute),
                )
                layout = ParallelLayout(tensor, pipeline, expert=expert, sequence=tensor > 1)
                each = expert // math.gcd(expert, tensor)  # replicas that hold the experts once

                def fits(
                    times: int, layout: ParallelLayout = layout, each: int = each, to: Training = training
                ) -> bool:
                    rank = memory.trainer_rank(self.merged, self._shape, replace(layout, data=times * each), to)
                    return sum(rank.values()) <= room

                if least := _least(fits, most // (tensor * pipeline * each)):
                    found.append(Trainer(layout, training, least * each))
        return found

    def _degrees(self) -> Iterator[tuple[int, ...]]:
        experts = [2**power for power in range(10) if self._shape.experts and self._shape.experts % 2**power == 0]
        tensors = [one for one in tensor_degrees(self._hf, trainer=True) if one <= self._hardware.per_machine]
        pipelines = [one for one in range(1, MOST_STAGES + 1) if self._shape.layers % one == 0]
        for degrees in itertools.product(tensors, pipelines, experts or [1]):
            if degrees[0] * degrees[1] <= MOST_GPUS:
                yield degrees

    def memory(self, layout: ParallelLayout, training: Training) -> dict[str, int]:
        """Return the bytes on the rank that holds most, by purpose."""
        return memory.trainer_rank(self.merged, self._shape, layout, training)

    def publish(self, layout: ParallelLayout, *, streams: bool, one_machine: bool) -> Publish:
        """Return the publish of a layout, which the number of replicas does not change."""
        key = replace(layout, data=1), streams
        if key not in self._sent:
            self._sent[key] = sizing.publish(
                self._weights,
                self._shape,
                key[0],
                dtype=DTYPE,
                bucket=BUCKET,
                streams=streams,
                one_machine=one_machine,
                hardware=self._hardware,
            )
        return self._sent[key]

    def speed(self, layout: ParallelLayout, training: Training, batch_tokens: float) -> TrainerSpeed:
        """Return the speed of a layout with a batch of this many tokens."""
        shape, hardware, number = self._shape, self._hardware, BYTES[DTYPE]
        again = training.recompute.granularity == "full"
        computing = self._each * (4 / 3 if again else 1)
        passes, width = 6 if again else 4, shape.hidden * number
        near = min(layout.expert, hardware.per_machine)
        away = ((near - 1) / hardware.inside + (layout.expert - near) / hardware.between) / layout.expert
        exchanged = shape.sparse * passes * shape.chosen * width * away
        link = _link(layout.tensor * layout.pipeline * layout.data, hardware) * hardware.share
        sent = 2 * (layout.pipeline - 1) * width / link
        each = computing + self._tensor_parallel(layout.tensor, again=again) + exchanged / hardware.share + sent
        micro_batches = max(1.0, batch_tokens / layout.data / training.tokens)
        each *= 1 + (layout.pipeline - 1) / micro_batches
        dense = self._count.dense / (layout.tensor * layout.pipeline) * (1 - 1 / layout.replicas)
        routed = self._count.routed / (layout.expert * layout.pipeline) * (1 - 1 / max(1, layout.expert_replicas))
        return TrainerSpeed(1 / each, (FLOAT + number) * (dense + routed) / link)

    def _tensor_parallel(self, ranks: int, *, again: bool) -> float:
        """Return the seconds of a GPU for a token in which it waits for tensor parallelism. `again`: activations are
        recomputed."""
        shape, hardware = self._shape, self._hardware
        blocks = 2 * shape.layers - (0 if shape.shared_inner else shape.sparse)
        link = _link(ranks, hardware) * hardware.share
        moved = blocks * (ranks - 1) * shape.hidden * BYTES[DTYPE] / link  # a gather or a scatter in every block
        first = sum(one.elements for one in self.merged if one.name.endswith(FIRST) and not one.routed)
        product = 2 * first / (hardware.flops * hardware.share)
        return moved * (5 if again else 3) + 2 * max(0.0, moved - product)


def _least(fits: Callable[[int], bool], most: int) -> int:
    """Return the smallest number up to `most` that fits, where every larger one does too; 0 if none does."""
    if most < 1 or not fits(most):
        return 0
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _merged(weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights with each layer's routed experts as one tensor for each of their matrices, which take as much
    memory and are much fewer."""
    found = dict[Any, Weight]()
    for one in weights:
        key: Any = (one.layer, one.shape, one.replicated) if one.routed else one.name
        rows = found[key].shape[0] if key in found else 0
        found[key] = one._replace(shape=(rows + one.shape[0], *one.shape[1:]))
    return list(found.values())
