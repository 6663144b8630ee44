"""Which tokens of a batch are trained: decisions over the whole batch at once, taken where its optimizer steps start.
They depend neither on the order of the batch nor on how it is split. Adding one is one function and one row.

A token that is left out stays in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable, known


@dataclass(frozen=True)
class SelectionParams:
    """The numbers that selections take."""

    m2_threshold: float = 0.04  # the paper's for every model


Selection = Callable[[TokenTable, SelectionParams], Tensor]
"""The table with `proximal`, `advantages` and `keep` -> [N] bool, the tokens of `keep` that are trained."""


def m2po(table: TokenTable, params: SelectionParams) -> Tensor:
    """Without the tokens of largest (log pi_p / mu)^2, as few as leave the others' mean at most `m2_threshold`: M2PO,
    arXiv 2510.01161. Only tokens that have moved the way their advantage wants (A > 0 and pi_p > mu, or A < 0 and
    pi_p < mu) are counted and can be left out, as in PPO's clip and in the paper's own code (Infini-AI-Lab/M2PO,
    kpo_clip_harmful_tokens, which turns the threshold into bounds of a clip in every micro-batch); AReaL counts all.
    Tokens as far out as one that is left out are left out with it."""
    keep = known(table.keep)
    log_ratio = known(table.proximal) - table.behaviour
    outward = keep & (log_ratio * known(table.advantages) > 0)
    squares = log_ratio**2
    ascending = squares[outward].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, dtype=ascending.dtype)
    within = int((means <= params.m2_threshold).sum())
    if within == len(ascending):
        return keep
    return keep & (~outward | (squares < ascending[within]))


SELECTIONS: dict[str, Selection] = {"m2po": m2po}
