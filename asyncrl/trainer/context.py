"""Context parallelism: the exchange between ranks that share each sequence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.parallel import Parallel


def gather_rows(mine: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
    """Gather the rows of all ranks: [n, ...] of this rank -> [N, ...]. `bounds` holds the first row of each rank, and
    the end. The gradient of a row is the sum over all ranks that used it."""
    found: Tensor = _GatherRows.apply(mine, bounds, group)
    return found


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, bounds: tuple[int, ...], group: Any) -> Tensor:
        ctx.bounds, ctx.group = bounds, group
        sizes = [end - begin for begin, end in pairwise(bounds)]
        sent = _padded(mine, max(sizes))
        received = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(received, sent, group=group)
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes = [end - begin for begin, end in pairwise(ctx.bounds)]
        parts = [_padded(part, max(sizes)).contiguous() for part in grads[0].split(sizes)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=ctx.group)
        return total[: sizes[dist.get_rank(ctx.group)]], None, None


def _padded(rows: Tensor, count: int) -> Tensor:
    """Pad with zeros to `count` rows, because collectives need the same number of rows on every rank."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def of_all_parts(own: Tensor, pack: Pack, parallel: Parallel) -> Tensor:
    """Combine values of a rank's own targets into [T] on every rank, so that all ranks compute the same loss. The
    gradient on each rank is that of its own part: Megatron's sum of weight gradients over ranks completes it."""
    if parallel.cp == 1:
        return own
    assert pack.own_targets is not None
    whole = own.new_zeros(len(pack.table_rows)).index_copy(0, pack.own_targets, own)
    found: Tensor = _SumOverRanks.apply(whole, parallel.cp_group)
    return found


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
