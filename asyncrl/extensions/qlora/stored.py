"""The quantized base of a run (trainer.lora.base), stored once in RUN/base for all of its checkpoints.

    STAGE-NUMBER.safetensors   codes and scales of whole weights, by HF's names    (packed.py)
    base.json                  their number format, and one SHA-256 of all of them; written last

A run that is resumed quantizes the weights of model.path again, which gives the same codes. The hash proves it: the
adapters of a checkpoint are worth nothing on another base.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import RecordError
from asyncrl.extensions.qlora.extension import BLOCK
from asyncrl.extensions.qlora.packed import Kind, pack_base, quantize, quantized
from asyncrl.parallel import Parallel, from_all
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.folder import write_stream
from asyncrl.weights.reshard import Resharder

FOLDER, INDEX = "base", "base.json"
FILE = 4 << 30
"""Bytes of a file, about."""


class QuantizedBase:
    """The format of a run's base."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def pack(self, weights: Resharder) -> None:
        """Quantize the weights of this rank's linear layers with adapters."""
        pack_base(weights, self._kind)

    def keep(self, run_dir: Path, origin: Path | None, weights: Resharder, parallel: Parallel) -> None:
        """Store the base of a run in its folder, or check that it is the one of the run that is resumed."""
        keep(run_dir, origin, weights, self._kind, parallel)


def keep(run_dir: Path, origin: Path | None, weights: Resharder, kind: Kind, parallel: Parallel) -> str:
    """Store the base of a run in its folder, and return its hash. Runs on every rank. `origin` is the folder of the run
    whose checkpoint is resumed, whose base stays as it is. Raises RecordError if that run had another base, and
    WeightsError if the disk cannot take it."""
    known = read(origin) if origin else None
    building = None if known and origin == run_dir else run_dir / f"{FOLDER}.partial"
    if building and parallel.is_first:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
    dist.barrier()
    found = _digest(_stored(weights, kind, building, parallel))
    if known and known["sha256"] != found:
        raise RecordError(
            f"The weights in model.path have a {kind} base with the hash {found}, but the checkpoint's adapters were "
            f"trained on {known['sha256']} ({origin}/{FOLDER}): set model.path to those weights."
        )
    if building and parallel.is_first:
        (building / INDEX).write_text(json.dumps({"base": kind, "block": BLOCK, "sha256": found}) + "\n")
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)  # of a start that left no checkpoint
        os.rename(building, run_dir / FOLDER)
    return found


def read(run_dir: Path) -> dict[str, Any] | None:
    """Return the index of a run's base; None if it has none."""
    file = run_dir / FOLDER / INDEX
    return dict(json.loads(file.read_text())) if file.is_file() else None


def _stored(weights: Resharder, kind: Kind, folder: Path | None, parallel: Parallel) -> Iterator[tuple[str, str]]:
    """Yield the name and the hash of each quantized tensor of this stage on exporting ranks, and write them to a
    folder if there is one."""
    held: dict[str, Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        if folder and held:
            [bucket] = plan_buckets(((name, t.dtype, t.shape) for name, t in held.items()), 1 << 62)
            write_stream(folder / f"{parallel.pp_rank}-{number:03d}.safetensors", bucket, iter(held.items()))
            number += 1
        held.clear()

    for name, weight in weights.whole(quantized(weights)):
        packed = quantize(weight, kind)
        for part, tensor in (("codes", packed.codes), ("scales", packed.scales)):
            held[f"{name}.{part}"] = tensor = tensor.cpu()
            yield f"{name}.{part}", hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
        if sum(one.nbytes for one in held.values()) > FILE:
            flush()
    flush()


def _digest(mine: Iterator[tuple[str, str]]) -> str:
    """Return one hash of the tensors of all stages; waits for all ranks."""
    every = from_all(sorted(mine))
    return hashlib.sha256(json.dumps(sorted(one for stage in every for one in stage)).encode()).hexdigest()
