"""Frozen reference weights that are scored in the policy's own network: they replace its weights for a pass, and need
memory for themselves but no second model (slime switches actor and reference in the same way)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config.algorithm import KLConfig
from asyncrl.trainer.network import Network
from asyncrl.weights.loading import load


class Reference:
    """The weights of an HF folder of the policy's architecture, in the policy's precision."""

    def __init__(self, network: Network, folder: Path, *, offload: bool) -> None:
        """Load the weights. With `offload` they stay in pinned host memory between passes."""
        self._network, places = network, network.weights.held()
        own = [place.data for place in places]
        for place in places:
            place.data = torch.empty_like(place.data)
        load(network.weights, folder)
        self._places = places
        loaded = [place.data for place in places]
        self._weights = [data.cpu().pin_memory() if offload and data.is_cuda else data for data in loaded]
        for place, data in zip(places, own, strict=True):
            place.data = data

    def states(self) -> list[Tensor]:
        """Return the weights."""
        return self._weights

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the network compute with these weights inside the block, alone; only for passes without gradient."""
        own = [place.data for place in self._places]
        try:
            for place, data in zip(self._places, self._weights, strict=True):
                place.data = data.to(place.device, non_blocking=True)
            with self._network.base():
                yield
        finally:
            for place, data in zip(self._places, own, strict=True):
                place.data = data


def reference_of(kl: KLConfig, network: Network, folder: Path) -> Reference | None:
    """Load the reference weights, if a KL to frozen weights is needed that the network does not hold itself, below what
    it trains. `folder` is the policy's."""
    if kl.reference != "weights" or (network.transformation.frozen and not kl.reference_path):
        return None
    path = Path(kl.reference_path).expanduser() if kl.reference_path else folder
    return Reference(network, path, offload=kl.reference_offload)
