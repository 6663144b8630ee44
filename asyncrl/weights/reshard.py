"""Megatron shards <-> HF tensors, as a stream: peak extra memory is one gathered tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.weights.names import Dims, Mapping

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def dims_of(hf: dict[str, Any]) -> Dims:
    """The numbers that layouts need, from an HF config."""
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    return Dims(
        heads,
        hf.get("num_key_value_heads", heads),
        head_dim,
        hf["vocab_size"],
        bool(hf.get("tie_word_embeddings", False)),
    )


def global_names(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """This stage's parameters, their layers numbered in the whole model."""
    numbers = {str(local): str(layer.layer_number - 1) for local, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        yield re.sub(r"(?<=\.layers\.)\d+", lambda found: numbers[found[0]], name, count=1), parameter


@torch.no_grad()
def hf_tensors(
    model: GPTModel, architecture: str, dims: Dims, tp_group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of this pipeline stage, in a fixed order, on every tensor-parallel rank.

    Every rank of the tensor-parallel group must walk the stream to its end: it joins a gather per split parameter.
    """
    mapping = Mapping(architecture)
    for name, parameter in global_names(model):
        if dims.tied and name == "output_layer.weight":
            continue  # the last stage's copy of the embedding
        names, layout = mapping.find(name)
        parts = _gather(parameter.data, tp_group) if layout.split else [parameter.data]
        yield from zip(names, layout.join(parts, dims), strict=True)


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return parts


@torch.no_grad()
def load_hf(model: GPTModel, folder: Path, architecture: str, dims: Dims, *, tp: int, tp_rank: int) -> None:
    """Fill this rank's parameters from an HF safetensors folder, reading only what it holds."""
    mapping, source = Mapping(architecture), _Folder(folder)
    for name, parameter in global_names(model):
        names, layout = mapping.find(
            "embedding.word_embeddings.weight" if dims.tied and name == "output_layer.weight" else name
        )
        shard = layout.shard([source.read(hf_name) for hf_name in names], tp, tp_rank, dims)
        if shard.shape != parameter.shape:
            raise ConfigError(
                "model.path",
                str(folder),
                f"{names} give a shard of {tuple(shard.shape)}, {name} needs {tuple(parameter.shape)}.",
            )
        parameter.copy_(shard)


class _Folder:
    """Tensors of an HF folder by name, from one file or an index of several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError("model.path", str(folder), "The folder holds no .safetensors file.")
        for file in files:
            opened = safe_open(file, framework="pt")
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if name not in self._file_of:
            raise ConfigError("model.path", str(self._folder), f"The tensor {name} is missing.")
        return self._file_of[name].get_tensor(name)
