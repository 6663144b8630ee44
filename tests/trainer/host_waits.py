"""Tensors without values, on which an operation whose result the host needs raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class OnlyOnDevice(TorchDispatchMode):
    """Raises when an operation makes a tensor on the host, unless it is a number."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            assert not isinstance(tensor, Tensor) or tensor.device == META or not tensor.dim(), function
        return out


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)
