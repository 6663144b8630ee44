"""PEFT folders (https://huggingface.co/docs/peft): written from the tensors of adapters, and read without executing
pickles.

An adapter changes a weight W to W + scale * B A. Its tensors are `MODULE.lora_A.weight` [rank, in] and
`MODULE.lora_B.weight` [out, rank]; MODULE is a linear layer such as `model.layers.0.self_attn.q_proj`. Those of a
layer's routed experts are in one: MODULE is `model.layers.0.mlp.experts.gate_up_proj` or `...down_proj`, the rows of A
are those of the experts one below the other, and column i * experts + e of B is column i of expert e. In files, PEFT
names these two by the nesting of its wrappers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.extensions.lora.peft_config import (
    CONFIG,
    DOWN,
    GATE_UP,
    PREFIX,
    TENSORS,
    adapted,
    adapter_folders,
    open_adapters,
    parsed,
    read_adapter_config,
)
from asyncrl.extensions.lora.weights import AdapterWeights
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.folder import write_stream

# --- writing ------------------------------------------------------------------------------------------------


def write_peft(target: Path, config: dict[str, Any], adapters: Iterable[tuple[str, Tensor]]) -> None:
    """Write a PEFT folder with the adapter_config.json of `user_config`. The folder gets its name only when it is
    complete, and replaces one of that name.

    Raises WeightsError if the disk cannot take it.
    """
    building = target.with_name(target.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    given = dict(adapters)
    nested = any(f".{DOWN}." in name for name in given)
    tensors = {PREFIX + _in_file(name, nested): tensor for name, tensor in given.items()}
    [bucket] = plan_buckets(((name, t.dtype, t.shape) for name, t in tensors.items()), 1 << 62)
    write_stream(building / TENSORS, bucket, ((entry.name, tensors[entry.name]) for entry in bucket))
    (building / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(building, target)


def _in_file(name: str, nested: bool) -> str:
    """Return PEFT's name: the wrapper of gate_up_proj is inside that of down_proj, if there are both."""
    experts = "mlp.experts"
    return name.replace(DOWN, experts).replace(GATE_UP, f"{experts}.base_layer" if nested else experts)


# --- reading ------------------------------------------------------------------------------------------------


def read_peft(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a PEFT folder, which are read from its file when they are used. Raises WeightsError or
    ConfigError for a folder that is not plain LoRA."""
    file = open_adapters(folder, "pt")
    found: dict[str, Tensor] = {}
    for module, names in adapted(read_adapter_config(folder), file.keys()).items():
        if missing := {"A", "B"} - names.keys():
            raise WeightsError(f"{module}.lora_{missing.pop()}.weight is missing in {folder}")
        a, b = (file.get_tensor(names[letter]) for letter in "AB")
        if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] > 0:
            raise WeightsError(
                f"the adapter of {module} in {folder} has A {[*a.shape]} and B {[*b.shape]}, which have no rank in "
                "common. Copy or export the folder again."
            )
        found |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return found


def start_from(root: Path, weights: AdapterWeights, names: Sequence[str]) -> None:
    """Fill a model's adapters of these names from their PEFT folders. Raises WeightsError or ConfigError if one has
    others, or not plain LoRA."""
    for name, folder in adapter_folders(root, names).items():
        tensors = read_peft(folder)
        weights.load(partial(_of_shape, tensors, folder), name)
        for module, _ in map(parsed, tensors):
            if not weights.adapts(module):
                raise WeightsError(f"{folder} adapts {module}, which is no linear layer that is trained here")


def _of_shape(tensors: dict[str, Tensor], folder: Path, name: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a folder. Raises WeightsError if it is missing or has another shape."""
    if name not in tensors:
        raise WeightsError(f"{name} is missing in {folder}")
    if tensors[name].shape != torch.Size(shape):
        found = [*tensors[name].shape]
        raise WeightsError(f"{name} in {folder} is {found}, but the model and trainer.lora ask for {[*shape]}")
    return tensors[name]
