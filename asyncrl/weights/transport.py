"""How a bucket's bytes reach the engines: one small protocol, four media (one file each), among which choice.py picks.

tensor       one host: the bucket lies in shared memory (CPU) or is a CUDA IPC handle; HTTP carries the handle
distributed  any host: HTTP carries names, dtypes and shapes; one gloo or NCCL broadcast carries the bytes
disk         a shared file system: safetensors files, written while the engines still generate
delta        the same, holding only what changed bit for bit since the version that the engines serve
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from asyncrl.weights.bucket import Bucket


class Transport(ABC):
    """Carries the buckets of one pipeline stage's exporting rank to every engine of the fleet."""

    ahead = False
    """Whether buckets are sent before the pause; then the pause holds only `deliver`."""
    memories = 2
    """Buckets that staging=stream takes: one is filled while the other is sent."""
    session = True
    """Whether the engines want a weight-update session around it."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for a bucket, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, version: int, *, full: bool = False) -> None:
        """Before the first bucket of a version; `full` asks for every byte, whatever the engines hold."""
        return  # most need no preparation

    @abstractmethod
    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Send one filled bucket; `flat` may be filled anew when this returns. Loses engines that do not load it."""

    def deliver(self, version: int) -> bool:
        """On rank 0, in the pause, after every stage has sent. False: the engines want all of it, in full."""
        return True

    def accepted(self, version: int) -> None:
        """On every exporting rank: the engines serve what was sent."""
        return
