"""The two conversions between HF folders and Megatron checkpoints. Each holds only the tensors of one Megatron
parameter at a time, or one stack of experts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.extensions.convert.checkpoint import CheckpointReader, CheckpointWriter
from asyncrl.extensions.convert.folders import building, check_space, copy_companions, read_config
from asyncrl.extensions.convert.parameters import Address, Parameter, Structure
from asyncrl.weights.bucket import Bucket, plan_buckets
from asyncrl.weights.folder import IGNORED, HFFolder, write_index, write_stream
from asyncrl.weights.layouts import VOCAB, Dims, dims_of

Progress = Callable[[Path, int], None]
COMPANIONS = "hf"  # the folder in a checkpoint that holds config and tokenizer


def to_megatron(source: Path, out: Path, *, dtype: torch.dtype | None, limit: int) -> None:
    """Convert an HF folder to a torch_dist checkpoint that Megatron loads under any layout. `limit` is the size of a
    file in bytes.

    Raises WeightsError with a tensor that is missing, left over, or of another shape than config.json says.
    """
    hf = read_config(source)
    structure, dims = Structure(hf), dims_of(hf)
    with HFFolder(source) as tensors, building(out) as folder, CheckpointWriter(folder, limit, progress()) as writer:
        changes = {**_dtype_change(dtype), **_check_leftover(tensors, structure, hf, source)}
        if dtype is None:
            check_space(folder, sum(file.stat().st_size for file in source.glob("*.safetensors")))
        for names, found in groupby(structure, key=lambda parameter: parameter.found.hf_names()):
            same = list(found)
            full = [_cast(tensors.read(name), same[0], dtype) for name in names]
            for parameter, parts in zip(same, _by_expert(same, full), strict=True):
                writer.add(parameter, _whole(parameter, parts, dims))
        copy_companions(source, folder / COMPANIONS, changes)
        writer.finish()


def to_hf(source: Path, out: Path, *, model: Path | None, dtype: torch.dtype | None, limit: int) -> None:
    """Convert a torch_dist checkpoint to an HF folder with an index of safetensors files of at most `limit` bytes (or
    one tensor).

    Config and tokenizer come from `model`, by default the source's own hf/. Raises WeightsError like `to_megatron`.
    """
    companions = model or source / COMPANIONS
    hf = read_config(companions)
    checkpoint = CheckpointReader(source)
    drafts = any(key.startswith("mtp.") for key in checkpoint.model_keys)
    structure, dims = Structure(hf, drafts=drafts), dims_of(hf)
    located = [(parameter, checkpoint.locate(parameter)) for parameter in structure]
    _check_keys(checkpoint, [address for _, address in located], source)

    def stream(read: Callable[[Address], Tensor]) -> Iterator[tuple[str, Tensor]]:
        for names, found in groupby(located, key=lambda one: one[0].found.hf_names()):
            same = list(found)
            each = [_parts(parameter, _cast(read(address), parameter, dtype), dims) for parameter, address in same]
            stacked = same[0][0].found.stacked
            yield from zip(names, [torch.stack([one for (one,) in each])] if stacked else each[0], strict=True)

    changes = {} if structure.drafts or not hf.get("num_nextn_predict_layers") else {"num_nextn_predict_layers": 0}
    write_hf(out, companions, dtype, stream(checkpoint.described), stream(checkpoint.read), limit, changes)


def dequantize(source: Path, out: Path, *, limit: int) -> None:
    """Write an HF folder whose weights are in FP8 as one in bfloat16, one tensor in memory at a time."""
    with HFFolder(source) as given:
        names = given.names()
        described = ((name, given.described(name)) for name in names)
        write_hf(out, source, torch.bfloat16, described, ((name, given.read(name)) for name in names), limit)


def write_hf(
    out: Path,
    companions: Path,
    dtype: torch.dtype | None,
    described: Iterator[tuple[str, Tensor]],
    tensors: Iterator[tuple[str, Tensor]],
    limit: int,
    changes: dict[str, Any] | None = None,
) -> None:
    """Write an HF folder whose config, but for `changes`, and tokenizer come from another one. `described` yields what
    `tensors` does, without values."""
    shards = plan_buckets(((name, t.dtype, t.shape) for name, t in described), limit)
    with building(out) as folder:
        check_space(folder, sum(shard[-1].end for shard in shards))
        copy_companions(companions, folder, {**_dtype_change(dtype), **(changes or {})})
        report = progress()
        files: dict[str, Bucket] = {}
        for number, shard in enumerate(shards, 1):
            file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_stream(file, shard, tensors)
            report(file, shard[-1].end)
            files[file.name] = shard
        write_index(folder, files)


# --- checks -------------------------------------------------------------------------------------------------


def _check_leftover(tensors: HFFolder, structure: Structure, hf: dict[str, Any], source: Path) -> dict[str, Any]:
    """Check that no tensor is left over, except in layers of multi-token prediction. Returns the changes of config.json
    that follow from leaving these out."""
    known = {name for parameter in structure for name in parameter.found.hf_names()}
    left = [name for name in tensors.names() if name not in known and not IGNORED.search(name)]
    if hf.get("tie_word_embeddings"):
        left = [name for name in left if name != "lm_head.weight"]  # a copy of the embedding
    further = [name for name in left if _layer(name) >= hf["num_hidden_layers"]]
    if others := sorted(set(left) - set(further)):
        raise WeightsError(f"{source} holds tensors that its config.json has no place for: {_listed(others)}")
    if not further or structure.drafts:  # its layers' copies of the embedding and of the output layer
        return {}
    _say(f"omitted, because config.json has no layers of multi-token prediction: {_listed(sorted(further))}")
    return {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in hf else {}


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _check_keys(checkpoint: CheckpointReader, used: list[Address], source: Path) -> None:
    if left := sorted(checkpoint.model_keys - {address.key for address in used}):
        raise WeightsError(f"{source} holds tensors that config.json has no place for: {_listed(left)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- one parameter ------------------------------------------------------------------------------------------


def _by_expert(same: list[Parameter], full: list[Tensor]) -> list[list[Tensor]]:
    """Return the HF tensors of each of the parameters that have them in common: all, or of a stack one expert's. Raises
    WeightsError for a stack of other experts than config.json says."""
    if not same[0].found.stacked:
        return [full]
    if len(full[0]) != len(same):
        (name,) = same[0].found.hf_names()
        raise WeightsError(f"{name} stacks {len(full[0])} experts, but config.json requires {len(same)}")
    return [[expert] for expert in full[0]]


def _whole(parameter: Parameter, full: list[Tensor], dims: Dims) -> Tensor:
    """Convert HF's tensors to Megatron's. Raises WeightsError unless the reverse conversion restores their shapes,
    because then they do not fit config.json."""
    shapes = [tuple(tensor.shape) for tensor in full]
    try:
        whole = parameter.found.layout.shard(full, 1, 0, dims)
        pieces = parameter.found.layout.join([whole.to("meta")], dims)
        back = [tuple(each.tensor().shape) for each in pieces]
    except RuntimeError:  # torch's error for shapes that are not divisible as the config requires
        back = []
    if back != shapes:
        raise WeightsError(f"{', '.join(parameter.found.hf_names())} of shapes {shapes} do not fit config.json")
    return whole


def _parts(parameter: Parameter, whole: Tensor, dims: Dims) -> list[Tensor]:
    """Convert Megatron's tensor, whose vocabulary may be padded, to HF's tensors."""
    try:
        if parameter.found.layout is VOCAB and len(whole) < dims.vocab:
            raise RuntimeError
        return [pieces.tensor() for pieces in parameter.found.layout.join([whole], dims)]
    except RuntimeError:
        raise WeightsError(f"{parameter.name} of shape {tuple(whole.shape)} does not fit config.json") from None


def _cast(tensor: Tensor, parameter: Parameter, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor, except for a router's bias, which keeps its precision in Megatron as in transformers: it decides
    between experts with nearly equal scores."""
    exact = parameter.name.endswith(".expert_bias")
    return tensor if dtype is None or exact else tensor.to(dtype)


def _dtype_change(dtype: torch.dtype | None) -> dict[str, str]:
    return {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}


# --- messages -----------------------------------------------------------------------------------------------


def progress() -> Progress:
    """Return a callback that reports each file on stderr: its size, and the seconds and speed since the previous
    file."""
    before = time.monotonic()

    def report(file: Path, nbytes: int) -> None:
        nonlocal before
        now = time.monotonic()
        seconds, before = now - before, now
        _say(f"{file.name}  {nbytes / 1e9:.3f} GB  {seconds:.1f} s  {nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s")

    return report


def _say(line: str) -> None:
    print(f"asyncrl-convert: {line}", file=sys.stderr, flush=True)
