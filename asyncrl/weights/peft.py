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
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.files import write_stream
from asyncrl.weights.peft_config import (
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
from asyncrl.weights.reshard import Resharder

KEPT = 4
"""Tensors in memory at a time: those of a layer's experts, which are read expert by expert."""


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
    """Return the tensors of dense layers that `write_peft` has written."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / TENSORS).items()}


class PeftFolder:
    """The adapters of a PEFT folder, open inside the `with` block."""

    def __init__(self, folder: Path) -> None:
        """Read the configuration. Raises WeightsError or ConfigError for a folder that is not plain LoRA."""
        self.config = read_adapter_config(folder)
        self.folder = folder
        self._files: dict[str, dict[str, str]] = {}

    def __enter__(self) -> Self:
        self._file = open_adapters(self.folder, "pt")
        self._tensor: Callable[[str], Tensor] = lru_cache(KEPT)(self._file.get_tensor)
        self._files = adapted(self.config, self._file.keys())
        for module in self._files:
            self._check_rank(module)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    @property
    def modules(self) -> list[str]:
        """Return the modules that have an adapter."""
        return list(self._files)

    def read(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read one tensor. Raises WeightsError if it is missing or has another shape."""
        module, letter = parsed(name)
        if module not in self._files:
            raise WeightsError(f"{name} is missing in {self.folder}")
        tensor = self._tensor(self._files[module][letter])
        if shape is not None and tensor.shape != torch.Size(shape):
            raise WeightsError(
                f"{name} in {self.folder} is {[*tensor.shape]}, but the model and trainer.lora ask for {[*shape]}"
            )
        return tensor

    def _shape(self, module: str, letter: str) -> list[int]:
        return [*self._file.get_slice(self._files[module][letter]).get_shape()]

    def _check_rank(self, module: str) -> None:
        if missing := {"A", "B"} - self._files[module].keys():
            raise WeightsError(f"{module}.lora_{missing.pop()}.weight is missing in {self.folder}")
        a, b, rank = self._shape(module, "A"), self._shape(module, "B"), self.config.rank_of(module)
        experts = a[0] // rank if module.endswith((GATE_UP, DOWN)) else 1
        if len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank * experts > 0:
            raise WeightsError(
                f"the adapter of {module} in {self.folder} has A {a} and B {b}, but {CONFIG} says rank {rank}. Copy "
                "or export the folder again."
            )


def start_from(root: Path, weights: Resharder, names: Sequence[str]) -> None:
    """Fill a model's adapters of these names from their PEFT folders. Raises WeightsError or ConfigError if one has
    others, or not plain LoRA."""
    for name, folder in adapter_folders(root, names).items():
        with PeftFolder(folder) as adapters:
            weights.load_adapters(adapters.read, name)
            for module in adapters.modules:
                if not weights.adapts(module):
                    raise WeightsError(f"{folder} adapts {module}, which is no linear layer that is trained here")
