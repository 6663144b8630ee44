"""Loading of HF tensors into a rank's model chunks: each rank reads what its parameters need, and nothing is
communicated. The other direction is reshard.py."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.weights.folder import HFFolder
from asyncrl.weights.layouts import NameRule
from asyncrl.weights.mapping import without_numbers
from asyncrl.weights.reshard import Resharder


@torch.no_grad()
def load(weights: Resharder, folder: Path) -> None:
    """Fill a rank's weights from an HF folder. Raises WeightsError with a tensor that is missing, left over or of
    another shape."""
    with HFFolder(folder) as source:
        for found, tensor in weights.tensors(weights.parameters):
            held = weights.mapping.find("embedding.word_embeddings.weight") if weights.is_tied_copy(found) else found
            shapes = whole_shapes(weights, found, tensor)
            count, expert = (weights.num_experts, found.expert) if found.stacked else (0, None)
            whole = [(count, *shape) if count else shape for shape in shapes]
            full = [source.read(name, shape, expert) for name, shape in zip(held.hf_names(), whole, strict=True)]
            fill(weights, found, tensor, full)
        source.check_nothing_left(weights.mapping, lambda name: _is_for_this_rank(weights, name))
        dropped = source.mtp_names()
    if dropped and weights.parallel.is_first:
        warnings.warn(f"{folder}: left out {len(dropped)} tensors of multi-token prediction: {dropped}", stacklevel=2)


def whole_shapes(weights: Resharder, found: NameRule, shard: Tensor) -> list[torch.Size]:
    """Return the shapes of the full tensors of which a rank holds this shard."""
    whole = found.layout.join([torch.empty_like(shard, device="meta")] * weights.degree(found), weights.dims)
    return [pieces.tensor().shape for pieces in whole]


def fill(weights: Resharder, found: NameRule, shard: Tensor, full: list[Tensor]) -> None:
    """Fill a rank's shard from full tensors."""
    shard.copy_(found.layout.shard(full, weights.degree(found), weights.rank(found), weights.dims))


def _is_for_this_rank(weights: Resharder, hf_name: str) -> bool:
    """Return whether an HF tensor belongs to a layer and an expert that this rank holds, or that no rank holds."""
    _, numbers = without_numbers(hf_name)
    layer, expert = numbers.get("layer"), numbers.get("expert")
    return (
        layer is not None
        and (layer in weights.layers or layer >= weights.num_layers)
        and (expert is None or expert in weights.experts or expert >= weights.num_experts)
    )
