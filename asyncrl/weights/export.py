"""The weights as an HF folder that transformers and SGLang load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.parallel import Parallel

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt")


def save_hf(target: Path, source: Path, stream: Iterable[tuple[str, Tensor]], parallel: Parallel, dtype: str) -> None:
    """Runs on every rank. Each pipeline stage writes its own file; config and tokenizer come from the source folder.

    The folder appears under its name only when it is whole.
    """
    building = target.with_name(target.name + ".partial")
    if parallel.is_first:
        shutil.rmtree(building, ignore_errors=True)
        shutil.copytree(source, building, ignore=shutil.ignore_patterns(*WEIGHTS))
    dist.barrier()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in stream}
    file = f"model-{parallel.pp_rank + 1:05d}-of-{parallel.pp:05d}.safetensors"
    if parallel.exports:
        save_file(tensors, building / file, metadata={"format": "pt"})
    written: list[tuple[str, list[str], int] | None] = [None] * dist.get_world_size()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    dist.all_gather_object(written, (file, list(tensors), nbytes) if parallel.exports else None)
    if parallel.is_first:
        _finish(building, [entry for entry in written if entry], dtype)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(building, target)
    dist.barrier()


def _finish(folder: Path, written: list[tuple[str, list[str], int]], dtype: str) -> None:
    """The index, and in config.json the precision and what was left out."""
    index = {
        "metadata": {"total_size": sum(nbytes for _, _, nbytes in written)},
        "weight_map": {name: file for file, names, _ in written for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0  # multi-token prediction was left out at loading
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
