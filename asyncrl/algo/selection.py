"""Token selection: decisions over the whole batch, made where its optimizer steps start, about which tokens are
trained. They depend neither on the order of the batch nor on how it is split. A loss names the selection that it needs.

A token that is left out still counts in the denominator. Of torch this module only calls methods of tensors
(algo/registry.py says why).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.settings import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.table import TrainingTable


def least_deviating(table: TrainingTable, *, threshold: Positive = 0.04) -> Tensor:
    """Return `keep` [N] without the tokens with the largest (log pi_p / mu)^2, as few as are needed for the mean of the
    others to be at most `threshold`: M2PO, arXiv 2510.01161, whose value for every model is 0.04.

    Only tokens that have moved in the direction of their advantage (A > 0 and pi_p > mu, or A < 0 and pi_p < mu) are
    counted and can be left out, as in PPO's clip and in the paper's own code (Infini-AI-Lab/M2PO,
    kpo_clip_harmful_tokens, which turns the threshold into clip bounds in every micro-batch); AReaL counts all tokens.
    Tokens with the same value as one that is left out are left out, too."""
    log_ratio = table.column("proximal") - table.behaviour
    outward = table.keep & (log_ratio * table.advantages > 0)
    squares = log_ratio**2
    ascending = squares[outward].sort().values
    means = ascending.cumsum(0) / ascending.new_ones(len(ascending)).cumsum(0)
    within = int((means <= threshold).sum())
    if within == len(ascending):
        return table.keep
    return table.keep & (~outward | (squares < ascending[within]))
