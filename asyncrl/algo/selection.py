"""Token selection: decisions over the whole batch, made where its optimizer steps start, about which tokens are
trained. They depend neither on the order of the batch nor on how it is split. A new one is one function and one row of
SELECTIONS.

A token that is left out still counts in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable, known


@dataclass(frozen=True)
class SelectionParams:
    """Parameters of the selections."""

    m2_threshold: float = 0.04  # the paper's value for every model


Selection = Callable[[TokenTable, SelectionParams], Tensor]
"""Maps the table with `proximal`, `advantages` and `keep` to [N] bool: the tokens of `keep` that are trained."""


def m2po(table: TokenTable, params: SelectionParams) -> Tensor:
    """Leave out the tokens with the largest (log pi_p / mu)^2, as few as are needed for the mean of the others to be at
    most `m2_threshold`: M2PO, arXiv 2510.01161. Only tokens that have moved in the direction of their advantage (A > 0
    and pi_p > mu, or A < 0 and pi_p < mu) are counted and can be left out, as in PPO's clip and in the paper's own code
    (Infini-AI-Lab/M2PO, kpo_clip_harmful_tokens, which turns the threshold into clip bounds in every micro-batch);
    AReaL counts all tokens. Tokens with the same value as one that is left out are left out, too."""
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
