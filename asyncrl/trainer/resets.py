"""Periodic resets: interpolation towards the initial weights, with new optimizer moments."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer


class Resets:
    """Every `every` batches, weights <- (1 - share) * weights + share * start (LoRR, arXiv 2508.06412; shrink and
    perturb, arXiv 1910.08475). Keeps a copy of the initial weights, in their own precision, only if resets are
    enabled."""

    def __init__(self, every: int | None, share: float, network: Network, optimizer: NetworkOptimizer) -> None:
        self._every, self._share = every, share
        self._network, self._optimizer = network, optimizer
        self._start: list[Tensor] = [p.detach().clone() for p in network.parameters()] if every else []

    @torch.no_grad()
    def after(self, batches: int) -> None:
        """Reset the weights if this number of trained batches calls for it."""
        if not self._every or batches % self._every:
            return
        for parameter, start in zip(self._network.parameters(), self._start, strict=True):
            parameter.lerp_(start.to(parameter.device), self._share)
        self._optimizer.start_anew()
