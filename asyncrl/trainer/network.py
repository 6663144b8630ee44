"""Megatron's GPT on this rank: its chunks of layers, and passes over packs with or without gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.config import TrainerConfig
from asyncrl.parallel import Parallel
from asyncrl.trainer import model as megatron
from asyncrl.trainer import recompute
from asyncrl.trainer.data_parallel import in_data_parallel
from asyncrl.trainer.encoder import Encoder
from asyncrl.trainer.head import Head
from asyncrl.trainer.layers import fp8_weights
from asyncrl.trainer.meter import StepMeter
from asyncrl.trainer.microbatches import Groups, TokenAccumulator, packs_of_rank
from asyncrl.trainer.operations import costs_of, operations_of
from asyncrl.trainer.sharding import PlacedTensor, placed
from asyncrl.trainer.transformation import Transformation
from asyncrl.weights.layouts import dims_of
from asyncrl.weights.loading import load
from asyncrl.weights.reshard import Resharder

AroundForward = Callable[[GPTModel, Pack, bool], AbstractContextManager[Callable[[], None]]]
"""Returns a block around the forward pass of a chunk over a pack, with gradient or not. It yields what is called before
the pass, and again before each part of it that is recomputed."""
Visit = Callable[[Head, Pack], Tensor]
"""Callback that the last stage runs on each pack. It returns the loss, or any tensor in a pass without gradient."""


class Network:
    """A model in Megatron's data parallelism, with gradients in float32. Under virtual pipelining a rank holds several
    chunks of layers, each of which is a model of its own."""

    def __init__(
        self,
        trainer: TrainerConfig,
        folder: Path,
        parallel: Parallel,
        *,
        transformation: Transformation | None = None,
        changed: Callable[[GPTModel], None] = lambda chunk: None,
        progress: Callable[[str], None] = lambda part: None,
        meter: StepMeter | None = None,
        encoder: Encoder | None = None,
        trains_encoder: bool = True,
    ) -> None:
        """Load the model of an HF folder. `changed` may change what each chunk of layers computes, before data
        parallelism wraps it. `progress` is called at the start of each micro-batch. `encoder` encodes what is not text.
        Networks may share it: those that do not train it say so."""
        self.transformation = transformation or Transformation()
        self.meter = meter or StepMeter(parallel)
        self._trainer = trainer
        self._parallel = parallel
        self._progress = progress
        self.hf = megatron.read_hf_config(folder)
        separate = self.transformation.frozen
        self.config = megatron.transformer_config(self.hf, trainer, separate=separate)
        self.encoder = encoder or Encoder()
        self._trains_encoder = trains_encoder
        self._forbidden = self._columns(self.encoder.forbidden)
        stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
        built = (megatron.build_model(self.hf, self.config, stage, separate=separate) for stage in stages)
        chunks = [chunk.to(parallel.device) for chunk in built]
        if chunks[0].pre_process:
            self.encoder.attach(chunks[0], trains=trains_encoder)
        half = trainer.dtype == "bfloat16"
        inner = [Float16Module(self.config, chunk) for chunk in chunks] if half else chunks
        self.weights = Resharder(chunks, self.hf["architectures"][0], dims_of(self.hf), parallel)
        load(self.weights, folder)  # after the cast, which could round tensors that stay in float32
        # Before data parallelism, which has buffers for what is trained.
        self.transformation.apply(chunks, self.weights)
        self._base_alone = False
        # Without data or context parallelism the distributed optimizer only adds copies of every buffer, but it alone
        # accepts moments of another number format.
        self.sharded = parallel.dp * parallel.cp > 1 or trainer.optimizer.moments_dtype != "float32"
        for chunk in chunks:
            changed(chunk)
        self._costs = costs_of(self.hf)
        self._operations = operations_of(self.hf)
        self.wrapped = in_data_parallel(inner, self.config, trainer, sharded=self.sharded)
        self.chunks = chunks
        """The models in their wrappers."""
        self._inner = dict(zip(self.wrapped, chunks, strict=True))
        # Of two stages, each is both the next and the previous of the other: without overlap, one batch of
        # point-to-point operations would mix the shapes of both directions.
        self.config.overlap_p2p_comm = len(chunks) > 1
        self.config.timers = self.meter
        self.around_forward: list[AroundForward] = []
        """Blocks that extensions put around the forward pass of each micro-batch."""
        for chunk in self.wrapped:
            chunk.train()

    def packs(self, groups: Groups) -> list[Pack]:
        """Return this rank's micro-batches of these groups, model by model."""
        return [
            replace(pack, model=model)
            for model, own in self.transformation.divided(groups)
            for pack in packs_of_rank(own, self._trainer, self._parallel, self._costs, self.encoder.placed)
        ]

    def train(self, packs: list[Pack], visit: Visit, *, first: bool = True, last: bool = True) -> None:
        """Accumulate the gradient of the sum of all losses, over all ranks, in the gradient buffers. Several calls
        accumulate one gradient: the `first` starts a new one, and only after the `last` it is reduced over the
        ranks."""
        if self.transformation.frozen:  # Megatron gathers parameters when their module runs: what is added may not
            self.gather()
        if first:
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
        self._run(packs, visit, forward_only=False, reduces=last)

    def scale_gradient(self, factor: float) -> None:
        """Multiply the gradient that was accumulated so far on this rank."""
        for chunk in self.wrapped:
            own = [one.main_grad for one in chunk.params_with_grad if not getattr(one, "holds_old_gradient", False)]
            if own:
                torch._foreach_mul_(own, factor)

    def gather(self) -> None:
        """Complete the parameters after the last optimizer step of a batch. With trainer.overlap_param_gather a step
        leaves each rank only its own shard new, and the next forward pass gathers the others."""
        if self._trainer.overlap_param_gather:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def score(self, packs: list[Pack], visit: Visit) -> None:
        """Run the packs without gradient."""
        self._run(packs, visit, forward_only=True)

    def column(self, groups: Groups, num_tokens: int, visit: Visit) -> Tensor:
        """Return what `visit` returns for the tokens of these groups, without gradient, [N] on the CPU."""
        seen = TokenAccumulator(num_tokens, self._parallel)

        def note(head: Head, pack: Pack) -> Tensor:
            values = visit(head, pack)
            seen.note(pack.table_rows, values=values)
            return values.sum()

        self.score(self.packs(groups), note)
        columns, _ = seen.gather(("values",))
        return columns["values"]

    @contextmanager
    def base(self) -> Iterator[None]:
        """Let the model folder's weights compute alone inside the block, if they are frozen."""
        self._base_alone = True
        try:
            yield
        finally:
            self._base_alone = False

    @cached_property
    def placed(self) -> list[PlacedTensor]:
        """All of these tensors with their positions in the whole model."""
        return placed(self.chunks, self.hf["vocab_size"])

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return all parameters of this rank."""
        for chunk in self.wrapped:
            yield from chunk.parameters()

    def packed(self) -> list[Tensor]:
        """Return what weights in another format hold (Transformation.apply)."""
        every = (module for chunk in self.wrapped for module in chunk.modules())
        return [tensor for module in every if hasattr(module, "packed") for tensor in module.packed.buffers()]

    def gradients(self) -> list[Tensor]:
        """Return the buffers of this rank's gradients, and FP8 copies of weights: each pass computes both anew."""
        buffers = [one for chunk in self.wrapped for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        copies = [tensor for chunk in self.chunks for tensor in fp8_weights(chunk)]
        return [*(buffer.grad_data for buffer in buffers), *copies]

    def _run(self, packs: list[Pack], visit: Visit, *, forward_only: bool, reduces: bool = True) -> None:
        """Run the packs of one model after those of another, so that layers that are computed again, and all stages of
        a pipeline, find the model of their pack active. Gradients are reduced after the last."""
        runs = [list(own) for _, own in itertools.groupby(packs, key=lambda pack: pack.model)]
        for number, own in enumerate(runs, 1):
            ends = reduces and number == len(runs)
            self.config.finalize_model_grads_func = finalize_model_grads if ends else None
            for chunk in self.wrapped:
                chunk.reduces = ends
            self.transformation.use(None if self._base_alone else own[0].model, gradient=not forward_only)
            self._run_active(own, visit, forward_only=forward_only)

    def _run_active(self, packs: list[Pack], visit: Visit, *, forward_only: bool) -> None:
        which, kind = itertools.count(1), "" if not forward_only else " without gradient"
        passes = len(packs) * len(self.wrapped)

        def forward_step(batches: Iterator[Pack], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch, inner = next(batches), self._inner[model]
            self._progress(f"micro-batch {next(which)} of {passes}{kind}")
            if inner.post_process and self._parallel.counts:
                frozen = self.transformation.frozen
                self.meter.count(self._operations.of(batch, gradient=not forward_only, frozen=frozen))

            def loss_function(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss = visit(self._head(inner, hidden[0]), batch)
                # zero tokens: Megatron must not divide again, because the token weights include the step's denominator
                return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach()}

            prepares = []
            if inner.pre_process:
                trains = self._trains_encoder and not forward_only
                prepares.append(self.encoder.embedded(inner, batch, trains=trains))
            with ExitStack() as around:
                blocks = [block(inner, batch, not forward_only) for block in self.around_forward]
                prepares += [around.enter_context(block) for block in blocks]
                out = forward(model, inner, batch, prepares)
            return out, loss_function

        interleaved = len(self.wrapped) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packs) for _ in self.wrapped] if interleaved else iter(packs),
            model=self.wrapped if interleaved else self.wrapped[0],
            num_microbatches=len(packs),
            seq_length=max(pack.num_tokens for pack in packs),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _head(self, model: GPTModel, hidden: Tensor) -> Head:
        rows, weight = self._trainer.logit_rows, head_weight(model)
        return Head(hidden, weight, self.hf["vocab_size"], rows, self._parallel, self._forbidden)

    def _columns(self, ids: Sequence[int]) -> Tensor | None:
        """Return this rank's columns of the logits of some tokens."""
        p, width = self._parallel, megatron.padded_vocab(self.hf["vocab_size"], self._parallel.tp) // self._parallel.tp
        mine = [one - p.tp_rank * width for one in ids if one // width == p.tp_rank]
        return torch.tensor(mine, device=p.device) if mine else None


def forward(
    wrapped: torch.nn.Module,
    model: GPTModel,
    pack: Pack,
    prepares: Sequence[Callable[[], None]] = (),
) -> Tensor:
    """Return the hidden states: [1, U, H] of the rows that predict a token on the last stage, [N, 1, H] on earlier
    stages. `wrapped` is `model` in its DDP wrapper; `prepares` give the model what is not in the pack, such as
    embeddings of images: before the pass, and again before each part of it that is recomputed."""

    def prepare() -> None:
        for one in model.ropes:
            one.positions = pack.own_positions if pack.rope is None else pack.rope
        if model.post_process:
            model.output_layer.rows = pack.logit_rows
        for one in prepares:
            one()

    precision = {"fp32_output": False} if model.config.bf16 else {}  # Float16Module would copy the hidden states
    with recompute.micro_batch(prepare):
        # The pack is passed as the attention mask.
        out: Tensor = wrapped(pack.token_ids[None], pack.own_positions[None], pack, **precision)
    return out


def head_weight(model: GPTModel) -> Tensor:
    """Return the weight by which the last stage multiplies hidden states, [V / tp, H]: the embedding if they are tied
    (a copy if another stage holds it)."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight
