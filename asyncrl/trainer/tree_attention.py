"""Attention over a pack without an N by N mask: memory grows with the number of rows, work with the pairs that attend.

FlexAttention gets the rule of the pack as a block mask. On a CPU, the platform applies the same rule.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from asyncrl.algo.pack import Pack
from asyncrl.platforms import without_gpu

BLOCK = 128
"""Rows and keys of a block of FlexAttention's mask."""
KERNEL_OPTIONS = {"BACKEND": "TRITON"}
"""Options of FlexAttention. By itself, torch 2.13 takes its decoding kernel for fewer than 128 rows, and raises
NoValidChoicesError for many combinations of rows and heads."""
MOST_GRAPHS = 32
"""Limit on compiled versions of FlexAttention: packs and parts of packs of one row, of one block and of several blocks,
each with and without gradient. Beyond its own limit of 8, torch would compute dense scores."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attend with each of this rank's n rows (all N without context parallelism) to the rows that the pack allows: q
    [n, h, d], k [N, g, d], v [N, g, e] -> [n, h, e]. With a window, keys that are as many positions or more before a
    query are hidden. `sinks` [h] are the scores of a key whose value is zero."""
    if q.device.type == "cpu":
        return without_gpu().attend(q, k, v, pack, scale, window, sinks)
    return _flex(q, k, v, pack, scale, window, sinks)


@cache
def _flex_attention() -> Any:
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "recompile_limit": MOST_GRAPHS}
    if "recompile_limit" not in signature(torch.compile).parameters:  # before torch 2.12: one limit for the process
        torch._dynamo.config.recompile_limit = options.pop("recompile_limit")
    return torch.compile(flex_attention, **options)  # torch's overloads lack the limit


def block_mask(pack: Pack, window: int | None = None) -> BlockMask:
    """Return the rule of `pack.ends`, and of a window, for FlexAttention, which stores it in blocks of rows and keys.

    The blocks follow from the largest and the smallest end, and position, of each block. (torch's create_block_mask
    evaluates the rule for every pair of rows: 3 bytes for each.) Nothing here makes the host wait for the device.
    """
    ends, (first, last) = pack.ends, pack.rows
    blocks = -(-len(ends) // BLOCK)
    by_block = pad(ends, (0, blocks * BLOCK - len(ends))).view(blocks, BLOCK)  # padding: keys that no row attends to
    key, row = torch.arange(blocks, device=ends.device) * BLOCK, torch.arange(first, last, BLOCK, device=ends.device)
    row = row[:, None]
    some = (key < (row + BLOCK).clamp(max=last)) & (row < by_block.amax(1))
    full = (key + BLOCK <= row + 1) & (row + BLOCK <= by_block.amin(1).clamp(max=last))
    offset = torch.full((), first, device=ends.device)  # a tensor, so that no compiled kernel depends on its value
    positions, wide = pack.positions, None if window is None else torch.full((), window, device=ends.device)
    if window is not None:
        (lowest_row, highest_row), (lowest_key, highest_key) = map(_extremes, (positions[first:last], positions))
        some &= lowest_row[:, None] - highest_key < window
        full &= highest_row[:, None] - lowest_key < window

    def attends(_: Tensor, __: Tensor, row: Tensor, key: Tensor) -> Tensor:
        found = (key <= row + offset) & (row + offset < ends[key])
        return found if wide is None else found & (positions[row + offset] - positions[key] < wide)

    lengths = (last - first, len(ends))
    return BlockMask.from_kv_blocks(*_ordered(some & ~full), *_ordered(full), BLOCK, attends, lengths)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are chosen for each block of rows, and their numbers, the chosen ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def _extremes(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest position of each block."""
    missing = (0, -len(positions) % BLOCK)
    lowest = pad(positions, missing, value=torch.iinfo(torch.int32).max).view(-1, BLOCK).amin(1)
    return lowest, pad(positions, missing, value=-1).view(-1, BLOCK).amax(1)


_MASKS: WeakKeyDictionary[Pack, dict[int | None, BlockMask]] = WeakKeyDictionary()  # by the window of a layer


def _flex(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    masks = _MASKS.setdefault(pack, {})
    if window not in masks:
        masks[window] = block_mask(pack, window)
    batched = (x.transpose(0, 1)[None] for x in (q, k, v))
    found = _flex_attention()(
        *batched,
        block_mask=masks[window],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=KERNEL_OPTIONS,
        **({} if sinks is None else {"return_aux": AuxRequest(lse=True)}),
    )
    if sinks is None:
        return found[0].transpose(0, 1)  # type: ignore[no-any-return]
    out, log_z = found[0][0].transpose(0, 1), found[1].lse[0].t()
    return out * torch.sigmoid(log_z - sinks.float())[..., None].to(out.dtype)
