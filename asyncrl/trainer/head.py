"""The output head: log-probability and entropy of each token from hidden states, with the vocabulary split over the
tensor-parallel ranks.

Logits exist for one chunk of rows at a time. Forward keeps those of the last chunk; backward starts with them and
recomputes the others. Memory is therefore that of one chunk whatever the length of a pack, and nothing is computed
twice if there is only one chunk.

With s the row's logits divided by the temperature, in float32 (float64 for models in float64), and p = softmax(s):

    log p_j = s_j - log Z        d log p_y / ds_j = [j = y] - p_j
    H = -sum_j p_j log p_j       dH / ds_j = -p_j (log p_j + H)

Ranks exchange their maxima and sums, in two all-reduces of one or a few numbers per row however many chunks there are,
and the gradient of the hidden states, in one all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.parallel import Parallel
from asyncrl.trainer.context import of_all_parts
from asyncrl.trainer.gradients import gradient_buffer

NOT_A_TOKEN = -1e30  # logit of a column that is no token, or forbidden; not -inf, because 0 * inf is NaN

PIECE = 1 << 20
"""Elements of a bfloat16 product that a CPU adds to float32 gradients at a time."""


@dataclass(frozen=True)
class Head:
    """The output head of the network for one pack, not yet run. Losses ask it for log-probabilities and entropy."""

    hidden: Tensor  # [U, H], equal on all tensor-parallel ranks
    weight: Tensor | None  # [V / tp, H], this rank's part of the vocabulary; the last rank's includes padding
    vocab: int
    chunk_rows: int  # maximum number of rows whose logits exist at a time
    parallel: Parallel
    forbidden: Tensor | None = None  # this rank's columns of tokens that engines never sample

    def score(self, pack: Pack, temperature: float, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each target [T] and, if requested, the entropy of the distribution it was drawn
        from [T].

        Computed as log_softmax(logits / temperature), like the engine's (SGLang, srt/layers/sampler.py).
        """
        rows = pack.row_of_target
        shard = _Shard(self.vocab, temperature, self.chunk_rows, self.parallel, self.forbidden)
        assert self.weight is not None
        logprobs, of_rows = _Scores.apply(self.hidden, self.weight, rows, pack.targets, shard, entropy)
        of_targets = of_all_parts(of_rows.index_select(0, rows), pack, self.parallel) if entropy else None
        return of_all_parts(logprobs, pack, self.parallel), of_targets


@dataclass(frozen=True)
class _Shard:
    """Parameters of one rank's logits."""

    vocab: int
    temperature: float
    chunk_rows: int
    parallel: Parallel
    forbidden: Tensor | None

    def chunks(self, rows: int) -> list[slice]:
        """Return the fewest possible chunks, of about equal size."""
        count = max(1, -(-rows // self.chunk_rows))
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]

    def scaled(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return s [C, V / tp]. The product is rounded to the model's precision, like the engine's."""
        s = (hidden @ weight.t()).to(_exact(hidden.dtype))
        if self.temperature != 1.0:
            s.div_(self.temperature)
        s[:, max(0, self.vocab - self.parallel.tp_rank * len(weight)) :] = NOT_A_TOKEN
        if self.forbidden is not None:
            s.index_fill_(1, self.forbidden, NOT_A_TOKEN)
        return s

    def places(self, chunk: slice, rows: Tensor, targets: Tensor, columns: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return which targets [T] lie in these rows and on this rank, and their (row, column). Every target gets a
        place, because counting the ones that are here would make the host wait for the device."""
        column = targets - self.parallel.tp_rank * columns
        here = (rows >= chunk.start) & (rows < chunk.stop) & (column >= 0) & (column < columns)
        return here, ((rows - chunk.start).clamp(0, chunk.stop - chunk.start - 1), column.clamp(0, columns - 1))

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place over the ranks that share the vocabulary."""
        if self.parallel.tp > 1:
            dist.all_reduce(values, op, group=self.parallel.tp_group)
        return values


class _Scores(torch.autograd.Function):
    """Compute (hidden [U, H], weight [V / tp, H], rows [T], targets [T]) -> log pi [T], and the entropy of each row
    [U]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, shard: _Shard, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        exact = _exact(hidden.dtype)
        chosen = hidden.new_zeros(len(targets), dtype=exact)
        largest = hidden.new_empty(len(hidden), dtype=exact)
        sums = hidden.new_empty(2 if entropy else 1, len(hidden), dtype=exact)  # e^(s - m), and that times (s - m)
        kept: list[Tensor] = []  # the last chunk's logits, and the only reference to them
        for chunk in shard.chunks(len(hidden)):
            kept.clear()
            kept.append(shard.scaled(hidden[chunk], weight))
            here, places = shard.places(chunk, rows, targets, len(weight))
            chosen += torch.where(here, kept[0][places], 0.0)
            largest[chunk] = kept[0].amax(-1)
            _sum_up(kept[0], largest[chunk], sums[:, chunk])
        largest, sums, chosen = _joined(shard, largest, sums, chosen)
        log_sum = sums[0].log()
        log_z = largest + log_sum
        of_rows = log_sum - sums[1] / sums[0] if entropy else None
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, rows, targets, log_z, of_rows)
            ctx.shard, ctx.kept = shard, kept
            ctx.set_materialize_grads(False)
        return chosen - log_z[rows], of_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients. Under Megatron's data parallelism the weight's gradient is added to its float32 buffer
        (main_grad) and not returned. That saves a second buffer and a pass over it, and tied embeddings still add
        theirs as usual. (Megatron's own fused accumulation does the same.) The hook that starts the reduction of a
        bucket (trainer.overlap_grad_reduce) still runs after this. A frozen weight gets no gradient."""
        hidden, weight, rows, targets, log_z, entropy = ctx.saved_tensors
        of_chosen, of_entropy = gradients
        shard: _Shard = ctx.shard
        if of_chosen is None:
            of_chosen = log_z.new_zeros(len(rows))
        of_chosen = of_chosen / shard.temperature
        of_log_z = torch.zeros_like(log_z).index_add_(0, rows, of_chosen).neg_()
        of_entropy = of_entropy / shard.temperature if of_entropy is not None else None
        of_hidden = torch.empty_like(hidden)
        of_weight = gradient_buffer(weight)
        trained = ctx.needs_input_grad[1]
        passed_on = torch.zeros_like(weight, dtype=log_z.dtype) if trained and of_weight is None else None
        accumulated = of_weight if passed_on is None else passed_on
        for chunk in reversed(shard.chunks(len(hidden))):
            s = ctx.kept.pop() if ctx.kept else shard.scaled(hidden[chunk], weight)
            log_p = s.sub_(log_z[chunk, None])
            if of_entropy is None:
                d = log_p.exp_().mul_(of_log_z[chunk, None])
            else:  # p (g - h (log p + H)), for the gradients g of log Z and h of the entropy
                p, h = log_p.exp(), of_entropy[chunk, None]
                d = log_p.mul_(-h).add_(of_log_z[chunk, None] - h * entropy[chunk, None]).mul_(p)
                del p
            here, places = shard.places(chunk, rows, targets, len(weight))
            d.index_put_(places, torch.where(here, of_chosen, 0.0), accumulate=True)
            d = d.to(hidden.dtype)
            torch.mm(d, weight, out=of_hidden[chunk])
            if accumulated is not None:
                _add_product(accumulated, d.t(), hidden[chunk])
            del s, log_p, d
        return shard.all_reduce(of_hidden), passed_on, None, None, None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums over the vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def _sum_up(s: Tensor, largest: Tensor, sums: Tensor) -> None:
    """Sum s [C, V / tp] with its maxima m [C] into `sums` [1 or 2, C]: e^(s - m), and e^(s - m) (s - m)."""
    shifted = s - largest[:, None]
    if len(sums) == 1:
        sums[0] = shifted.exp_().sum(-1)
    else:
        weighted = shifted.exp()
        sums[0] = weighted.sum(-1)
        sums[1] = weighted.mul_(shifted).sum(-1)


def _joined(shard: _Shard, largest: Tensor, sums: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce one rank's maxima [U], sums [1 or 2, U] and chosen logits [T] to those of the whole vocabulary."""
    if shard.parallel.tp == 1:
        return largest, sums, chosen
    everywhere = shard.all_reduce(largest.clone(), dist.ReduceOp.MAX)
    lower = largest - everywhere
    if len(sums) == 2:
        sums[1] += lower * sums[0]
    sums = sums * lower.exp()
    flat = shard.all_reduce(torch.cat([sums.flatten(), chosen]))
    return everywhere, flat[: sums.numel()].view_as(sums), flat[sums.numel() :]


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute into += left @ right, without writing the product of all rows first. The sum over chunks and
    micro-batches has the precision of `into`."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    elif into.is_cuda:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:  # on a CPU, products have the type of their factors
        rows = max(1, min(PIECE, left.numel()) // right.shape[1])
        for total, part in zip(into.split(rows), left.split(rows), strict=True):
            total.add_(part @ right)
