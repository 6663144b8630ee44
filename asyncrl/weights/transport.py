"""Transports of a bucket's bytes to the engines: one small protocol, three implementations (one file each), and those
of extensions; choice.py picks one.

tensor       one host: the bucket is in shared memory (CPU) or shared by CUDA IPC; HTTP carries the handle
distributed  any host: HTTP carries names, dtypes and shapes; one gloo or NCCL broadcast carries the bytes
disk         a shared file system: safetensors files, written while the engines still generate
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from asyncrl.weights.bucket import Bucket


class Transport(ABC):
    """Sends the buckets of one pipeline stage's exporting rank to every engine of the fleet."""

    ahead = False
    """Whether buckets are sent before the pause; then the engines are paused only for `deliver`."""
    memories = 2
    """Number of buckets that staging=stream needs: one is filled while another is sent."""
    turns = False
    """Whether pipeline stages must send one after the other."""
    session = True
    """Whether the engines need a weight-update session around the transfer."""

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate memory for a bucket, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, version: int, *, full: bool = False) -> None:
        """Prepare for the first bucket of a version. `full` requests all bytes, whatever the engines hold."""
        return  # most transports need no preparation

    @abstractmethod
    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Send one filled bucket. `flat` may be refilled when this returns. Engines that do not load the bucket are
        lost."""

    def deliver(self, version: int) -> bool:
        """Complete the transfer, on rank 0, during the pause, after every stage has sent. Returns False if the engines
        need the full weights."""
        return True

    def accepted(self, version: int) -> None:
        """Record that the engines serve what was sent; called on every rank."""
        return
