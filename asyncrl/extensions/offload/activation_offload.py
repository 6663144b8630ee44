"""Offload of activations to host memory between forward and backward (offload.activations).

What autograd saves in a layer is copied to pinned host memory while the next layer runs, and is freed at the end of
that. Backward brings back a layer while it works on the one after. A rank thus holds the activations of two layers,
plus what is smaller than LEAST_BYTES. With recomputation of whole layers, only their inputs are saved, and moved.

Storages are moved, not tensors: they come back with the same bytes, and views of one storage as views of one.
Megatron's own fine-grained offload cannot be used: it records the layers and micro-batches of the first step and
expects the same sequence in every later step (PipelineOffloadManager._cached_chunks_forward in 0.16.1), while the
number of micro-batches here follows from the packs; and it imports TransformerEngine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1 << 20
"""Size of the smallest storage that is moved."""


@dataclass(eq=False)
class _Layer:
    """What autograd saves between two calls of `next_layer`. It lives as long as autograd needs something of it."""

    before: _Layer | None
    places: dict[int, int] = field(default_factory=dict)  # of each storage in the lists below, as bytes
    device: list[Tensor | None] = field(default_factory=list)  # None: only in host memory
    host: list[Tensor | None] = field(default_factory=list)  # None: not copied
    copied: Any = None  # the event after which all copies are complete

    def keep(self, tensor: Tensor) -> int:
        """Add the storage of a tensor, and return its place."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.places:
            self.places[storage._cdata] = len(self.device)
            elements = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            self.device.append(elements.view(torch.uint8))
            self.host.append(None)
        return self.places[storage._cdata]

    def free(self) -> None:
        """Free the device memory of what is in host memory."""
        self.device = [one if host is None else None for one, host in zip(self.device, self.host, strict=True)]


class _SavedTensor(NamedTuple):
    """A tensor as autograd holds it."""

    layer: _Layer
    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _nothing() -> None:
    """Prepare nothing before a pass."""


class ActivationOffload:
    """Moves activations of one rank. `resident` returns tensors that stay on the device in any case, such as the
    parameters. `stand_in` also moves storages of the CPU, for tests on machines without a GPU."""

    def __init__(self, resident: Callable[[], Iterable[Tensor]], *, stand_in: bool = False) -> None:
        self._resident = resident
        self.stand_in = stand_in
        self.least = LEAST_BYTES
        self._stays: set[int] = set()
        self._layer: _Layer | None = None  # of the running forward pass
        self._leaving: Callable[[], _Layer | None] = lambda: None  # the layer before, whose copies may be under way
        self._here: Callable[[], _Layer | None] = lambda: None  # the layer that backward works on
        self._streams: dict[str, Any] = {}

    @contextmanager
    def micro_batch(self, chunk: Any, pack: Any, gradient: bool) -> Iterator[Callable[[], None]]:
        """Move what autograd saves in the forward pass inside the block. No-op without gradient."""
        if not gradient:
            yield _nothing
            return
        self._stays = {tensor.untyped_storage()._cdata for tensor in self._resident()}
        self._layer = _Layer(None)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield _nothing
            self.next_layer()
        finally:
            self._layer = None

    def next_layer(self, *_: Any) -> None:
        """Begin to copy what was saved since the last call, and free what was saved before that. No-op outside of
        `micro_batch`, such as in a recomputed pass."""
        if self._layer is None or not self._layer.device:
            return
        self._send(self._layer)
        if (leaving := self._leaving()) and leaving is not self._here():
            self._wait(leaving)
            leaving.free()
        self._leaving = weakref.ref(self._layer)
        self._layer = _Layer(self._layer)

    # -- what autograd calls -------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        if self._layer is None or not self._moves(tensor):
            return tensor.detach()  # an output itself would hold the graph that holds it
        place = self._layer.keep(tensor)
        return _SavedTensor(self._layer, place, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _moves(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is moved. TransformerEngine's own kinds of tensors, which are more than their
        storage, are its cached FP8 weights."""
        if not (tensor.is_cuda or self.stand_in) or not type(tensor).__module__.startswith("torch"):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self.least and storage._cdata not in self._stays

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._arrive(saved.layer)
        whole: Any = saved.layer.device[saved.place]
        with torch.no_grad():
            return whole.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _arrive(self, layer: _Layer) -> None:
        """Bring a layer to the device, and begin to bring the one before."""
        if layer is self._here():
            return
        if after := self._here():
            after.free()
        self._load(layer)
        self._wait(layer)
        if layer.before:
            self._load(layer.before)
        self._here = weakref.ref(layer)

    # -- copies --------------------------------------------------------------------------------------------

    def _send(self, layer: _Layer) -> None:
        """Begin to copy a layer to host memory, except what has been freed already, because it is recomputed."""
        with self._stream("out", layer):
            for place, whole in enumerate(layer.device):
                if whole is not None and whole.untyped_storage().nbytes():
                    host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=whole.is_cuda)
                    layer.host[place] = host.copy_(whole, non_blocking=True)

    def _load(self, layer: _Layer) -> None:
        """Begin to copy a layer to the device, if it is not there."""
        missing = [place for place, whole in enumerate(layer.device) if whole is None]
        if not missing:
            return
        with self._stream("back", layer):
            for place in missing:
                host: Any = layer.host[place]
                device = "cpu" if self.stand_in else torch.device("cuda", torch.cuda.current_device())
                layer.device[place] = host.to(device, non_blocking=True, copy=True)

    @contextmanager
    def _stream(self, name: str, layer: _Layer) -> Iterator[None]:
        """Copy on a stream of its own, after what the current one has been told so far."""
        if self.stand_in:
            yield
            return
        stream = self._streams.get(name) or self._streams.setdefault(name, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        layer.copied = stream.record_event()

    def _wait(self, layer: _Layer) -> None:
        """Make the current stream wait for the copies of a layer."""
        if layer.copied is not None:
            torch.cuda.current_stream().wait_event(layer.copied)
