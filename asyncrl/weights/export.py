"""Export of the weights as an HF folder, which transformers and SGLang can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from asyncrl.models.families import known_families
from asyncrl.parallel import Parallel, from_all
from asyncrl.schema import POLICY
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.folder import HFFolder, write_index, write_stream
from asyncrl.weights.reshard import Resharder

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt")
SHARD_BYTES = 4 << 30


def save_hf(
    target: Path,
    source: Path,
    weights: Resharder,
    parallel: Parallel,
    dtype: str,
    *,
    merged: str = POLICY,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save the weights, with what this model adds to them; runs on every rank. Each pipeline stage writes its own
    files, with one tensor in memory at a time. Config, tokenizer, and the weights that the trainer leaves alone (a
    vision tower, layers of multi-token prediction) come from the source folder. The folder gets its final name only
    when it is complete.

    Raises WeightsError if the disk cannot take it.
    """
    building = target.with_name(target.name + ".partial")
    if parallel.is_first:
        shutil.rmtree(building, ignore_errors=True)
        shutil.copytree(source, building, ignore=shutil.ignore_patterns(*WEIGHTS))
    own = list(weights.described())
    copied = partial(_kept, source, but={name for name, *_ in own}) if parallel.is_first else lambda **_: iter(())
    shapes = [(name, one.dtype, one.shape) for name, one in copied(described=True)]
    # collective, so that rank 0 has created the folder
    plans = from_all(plan_buckets(chain(own, shapes), shard_bytes))
    count = sum(len(plan) for plan in plans)
    names = (f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    files = [[(next(names), bucket) for bucket in plan] for plan in plans]
    stream = chain(weights.hf_tensors(merged=merged), copied())
    for name, bucket in files[dist.get_rank()]:
        write_stream(building / name, bucket, stream)
    rest = [name for name, _ in stream]  # ranks that export nothing still take part in every gather
    assert not rest, f"the stream yielded tensors that were not planned: {rest}"
    dist.barrier()
    if parallel.is_first:
        write_index(building, {name: bucket for of_rank in files for name, bucket in of_rank})
        _describe(building, dtype, drafts=any(name.endswith(".eh_proj.weight") for name, *_ in chain(own, shapes)))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(building, target)
    dist.barrier()


def _kept(source: Path, *, but: set[str], described: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder's vision tower and layers of multi-token prediction, but those that are trained;
    `described` ones have no values."""
    hf = json.loads((source / "config.json").read_text())
    (architecture,) = hf.get("architectures") or [""]
    family = known_families().get(architecture)
    tower = family.tower.prefix if family and family.tower else None
    if not (tower or hf.get("num_nextn_predict_layers")):
        return
    with HFFolder(source) as given:
        drafts = set(given.mtp_names())
        for name in given.names():
            if name not in but and (name in drafts or (tower and name.startswith(tower))):
                yield name, given.described(name) if described else given.read(name)


def gathered(tensors: Iterator[tuple[str, Tensor]], parallel: Parallel) -> dict[str, Tensor]:
    """Return the tensors of all pipeline stages on rank 0, and none elsewhere; runs on every rank."""
    mine = {name: tensor.cpu() for name, tensor in tensors}
    if parallel.pp == 1:
        return mine if parallel.is_first else {}
    stages: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, stages if parallel.is_first else None)
    return {name: tensor for stage in stages if stage for name, tensor in stage.items()}


def _describe(folder: Path, dtype: str, *, drafts: bool) -> None:
    """Write the precision into config.json, and that there are no layers of multi-token prediction unless the folder
    has them. Everything else stays as the publisher wrote it: SGLang reads fields that transformers does not write."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    if "num_nextn_predict_layers" in config and not drafts:
        config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
