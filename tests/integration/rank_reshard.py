"""One rank of the resharding test: python rank_reshard.py FOLDER, under torchrun.

Builds every model of FOLDER in every layout that its cases.json names for this number of ranks, loads it, exports it,
and compares each exported tensor with the HF folder byte for byte. The first rank writes what every rank found.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from asyncrl.config import TrainerConfig, read  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer import model as megatron  # noqa: E402
from asyncrl.trainer.parallel import split  # noqa: E402
from asyncrl.weights.layouts import dims_of  # noqa: E402
from asyncrl.weights.reshard import Resharder  # noqa: E402


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a rank that stays away from a gather
    base = read(folder).trainer
    mine: dict[str, dict[str, Any]] = {}
    cases = json.loads((folder / "cases.json").read_text())[str(dist.get_world_size())]
    for layout, (settings, models) in cases.items():
        split_of = base.pipeline_split.model_copy(update=settings.get("pipeline_split", {}))
        trainer = base.model_copy(update={**settings, "pipeline_split": split_of})
        parallel = split(trainer, torch.device("cpu"), seed=0)
        for name in models:
            mine[f"{layout}/{name}"] = found(folder / name, trainer, parallel)
        parallel_state.destroy_model_parallel()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    if dist.get_rank() == 0:
        (folder / f"found-{dist.get_world_size()}.json").write_text(json.dumps(of_ranks))
    dist.barrier()
    dist.destroy_process_group()


def found(folder: Path, trainer: TrainerConfig, parallel: Parallel) -> dict[str, Any]:
    """Return what this rank exports of one model in one layout."""
    hf = megatron.read_hf_config(folder)
    config = megatron.transformer_config(hf, trainer.model_copy(update={"dtype": hf["dtype"]}))
    stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    chunks = [megatron.build_model(hf, config, stage) for stage in stages]
    weights = Resharder(chunks, hf["architectures"][0], dims_of(hf), parallel)
    weights.load(folder)
    exported = list(weights.hf_tensors())
    described = list(weights.described())
    with PeakMemory(tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())) as peak:
        for _ in weights.stream():
            pass
    reference = load_file(folder / "model.safetensors") if exported else {}
    return {
        "exports": parallel.exports,
        "names": [name for name, _ in exported],
        "different": [name for name, tensor in exported if not same_bytes(tensor, reference[name])],
        "described": described == [(name, tensor.dtype, tensor.shape) for name, tensor in exported],
        "largest": max((tensor.nbytes for tensor in reference.values()), default=0),
        "total": sum(tensor.nbytes for tensor in reference.values()),
        "peak": peak.bytes,
    }


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one).equal(raw(other))


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class PeakMemory(TorchDispatchMode):
    """Peak memory of the tensors that are created in this context. Memory known before (`known`) does not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        alive = [tensor for made in self._made if (tensor := made()) is not None]  # held while they are counted
        storages = {s.data_ptr(): s.nbytes() for tensor in alive for s in [tensor.untyped_storage()]}
        self._made = [weakref.ref(tensor) for tensor in alive]
        self.bytes = max(self.bytes, sum(size for start, size in storages.items() if start not in self._known))
        return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
