"""Offload of tensors of a trainer rank to host memory: of the optimizer's states while passes need the device
(offload.optimizer), and of all that it holds for whoever wants the device (the extension `colocated`).

Storages are moved, not tensors: a storage is copied to pinned host memory and shrunk to nothing, and later takes the
same bytes back. Megatron's parameters, gradients and shards of the distributed optimizer are views of a few large
buffers, and all of these views stay valid. (Megatron's own `offload_to_cpu` moves tensors. It leaves parameters without
the distributed optimizer on the device, separates float32 masters from the parameters that they are, and allocates host
memory at each move.) On a CPU nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer, StatesMemory


class HeldTensors(NamedTuple):
    """The tensors of a rank that take memory between two steps."""

    parameters: list[Tensor]  # needed to publish
    gradients: list[Tensor]  # worthless between two updates
    states: list[Tensor]  # masters, moments, frozen weights; a float32 parameter is its own master


@dataclass
class _Away:
    """A storage whose bytes are in host memory, or are worthless (None)."""

    storage: UntypedStorage
    nbytes: int
    host: Tensor | None


class DeviceMemory:
    """Moves what a rank holds between its device and host memory. `stand_in` also moves storages of the CPU, for tests
    on machines without a GPU."""

    def __init__(self, held: Callable[[], HeldTensors], *, stand_in: bool = False) -> None:
        self._held = held
        self._stand_in = stand_in
        self._away: dict[int, _Away] = {}
        self._hosts: dict[int, Tensor] = {}  # host memory is kept: pinning it takes longer than a copy

    @torch.no_grad()
    def offload(self, *, parameters: bool) -> None:
        """Free the device memory of gradients and states, and of `parameters`. No-op for what is already away."""
        held = self._held()
        weights = _storages(held.parameters)
        gradients = _storages(held.gradients)
        stored = {key: one for key, one in _storages(held.states).items() if key not in weights}
        for key, storage in (stored | weights if parameters else stored).items():
            self._move(key, storage, keep=True)
        for key, storage in gradients.items():
            self._move(key, storage, keep=False)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for away in self._away.values():
            away.storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self, *, everything: bool) -> None:
        """Bring the parameters back to the device, and with `everything` the rest. Gradients come back as zeros."""
        wanted = self._away.keys() if everything else self._away.keys() & _storages(self._held().parameters).keys()
        for key in list(wanted):
            away = self._away.pop(key)
            away.storage.resize_(away.nbytes)
            flat = _bytes_of(away.storage)
            flat.zero_() if away.host is None else flat.copy_(away.host, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or if its storage is away, the same elements in host memory."""
        away = self._away.get(tensor.untyped_storage()._cdata)
        if away is None or away.host is None:
            return tensor
        elements = torch.empty(0, dtype=tensor.dtype).set_(away.host.untyped_storage())
        return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _move(self, key: int, storage: UntypedStorage, *, keep: bool) -> None:
        if key in self._away or not (storage.device.type == "cuda" or self._stand_in) or not storage.nbytes():
            return
        known = self._hosts.get(key)
        if keep and (known is None or known.nbytes != storage.nbytes()):  # the storage of new moments may have the key
            self._hosts[key] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
        host = self._hosts[key].copy_(_bytes_of(storage), non_blocking=True) if keep else None
        self._away[key] = _Away(storage, storage.nbytes(), host)


class MovedStates(StatesMemory):
    """The states of an optimizer in host memory between steps."""

    def __init__(self, network: Network, optimizer: NetworkOptimizer) -> None:
        self.memory = DeviceMemory(lambda: HeldTensors(list(network.parameters()), [], list(optimizer.states())))

    def bring(self) -> None:
        """Bring the states to the device, if they are not there."""
        self.memory.onload(everything=True)

    def leave(self) -> None:
        """Move them to host memory."""
        self.memory.offload(parameters=False)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages of these tensors by identity, each once."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
