"""A publisher whose parts only note what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.network.addresses import Access
from asyncrl.parallel import Parallel
from asyncrl.weights.bucket import Bucket
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.publish import Outgoing, Publisher
from asyncrl.weights.transport import Transport
from tests.integration.publisher import ALONE, FakeRollout

TENSORS = {f"model.layers.{layer}.mlp.gate.weight": torch.full((4,), float(layer)) for layer in range(4)}


def published(
    device: str,
    *,
    staging: str = "stream",
    publish: Callable[[Publisher, int], object] = Publisher.publish,
    expected: dict[str, Tensor] = TENSORS,
) -> list[str]:
    """Return the events of one publish of four buckets, with `stream` through the memory of two."""
    events: list[str] = []
    settings = SimpleNamespace(staging=staging, pause_mode="in_place", verify=False, verify_every=None, bucket_mb=0)
    made: Any = Publisher(
        Parallel(**{**ALONE, "device": torch.device(device)}),
        Update(Fleet([], Access(""), 1.0, on_lost=lambda *_: None), mode="in_place"),
        NotingTransport(events, expected),
        Outgoing(Weights(), lambda: None),  # type: ignore[arg-type, return-value]
        settings,  # type: ignore[arg-type]
        FakeRollout(),
    )
    if made._stream:
        made._stream.events = events
    publish(made, 1)
    return events


class Weights:
    """Four tensors, one for each bucket."""

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        return ((name, tensor.dtype, tensor.shape) for name, tensor in TENSORS.items())

    def stream(self, *, merged: bool = True) -> Iterator[tuple[str, Pieces]]:
        return ((name, Pieces([tensor])) for name, tensor in TENSORS.items())

    def figures(self) -> dict[str, float]:
        return {}


class NotingTransport(Transport):
    """Transport that notes what it sends."""

    def __init__(self, events: list[str], expected: dict[str, Tensor]) -> None:
        self._events, self._expected = events, expected

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        assert torch.equal(flat.view(torch.float32), self._expected[bucket[0].name])
        self._events.append(f"send {bucket[0].name.split('.')[2]}")
