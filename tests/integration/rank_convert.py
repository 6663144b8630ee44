"""One rank of the conversion test: python rank_convert.py FOLDER, under torchrun.

For every layout and model that FOLDER's cases.json names for this number of ranks: a real Megatron model loads the
converted checkpoint and is compared, bit for bit, with one that read the HF folder; then Megatron saves it. The first
rank writes what every rank found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.config import TrainerConfig, read  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer import model as megatron  # noqa: E402
from asyncrl.trainer.parallel import split  # noqa: E402
from asyncrl.weights.layouts import dims_of  # noqa: E402
from asyncrl.weights.reshard import Resharder  # noqa: E402


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base, ranks = read(folder).trainer, dist.get_world_size()
    mine = {}
    for layout, (settings, models) in json.loads((folder / "cases.json").read_text())[str(ranks)].items():
        trainer = base.model_copy(update=settings)
        parallel = split(trainer, torch.device("cpu"), seed=0)
        for name in models:
            mine[f"{layout}/{name}"] = found(folder / name, layout, trainer, parallel)
        parallel_state.destroy_model_parallel()
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, mine)
    if dist.get_rank() == 0:
        (folder / f"found-{ranks}.json").write_text(json.dumps(of_ranks))
    dist.barrier()
    dist.destroy_process_group()


def found(folder: Path, layout: str, trainer: TrainerConfig, parallel: Parallel) -> dict[str, Any]:
    """Return the names of this rank's tensors, of those that differ from the checkpoint, and of those that it did not
    set."""
    chunks, random = build(folder / "hf", trainer), {}
    for number, chunk in enumerate(chunks):
        random.update({f"{number}.{name}": tensor.clone() for name, tensor in weights(chunk).items()})
    loaded = dist_checkpointing.load(sharded(chunks), str(folder / "megatron"))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    mine = {f"{number}.{name}": t for number, chunk in enumerate(chunks) for name, t in weights(chunk).items()}
    reference = build(folder / "hf", trainer)
    hf = megatron.read_hf_config(folder / "hf")
    Resharder(reference, hf["architectures"][0], dims_of(hf), parallel).load(folder / "hf")
    expected = {f"{number}.{name}": t for number, chunk in enumerate(reference) for name, t in weights(chunk).items()}
    saved = folder / f"saved-{layout}"
    if parallel.is_first:
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded(chunks), str(saved))
    return {
        "names": sorted(mine),
        "same names": mine.keys() == expected.keys(),
        "different": [name for name, tensor in mine.items() if not same_bits(tensor, expected[name])],
        "untouched": [name for name, tensor in mine.items() if same_bits(tensor, random[name])],
    }


def build(model: Path, trainer: TrainerConfig) -> list[GPTModel]:
    """Return this rank's chunks with random weights, including norms and biases."""
    hf = megatron.read_hf_config(model)
    config = megatron.transformer_config(hf, trainer.model_copy(update={"dtype": hf["dtype"]}))
    stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    chunks = [megatron.build_model(hf, config, stage) for stage in stages]
    with torch.no_grad():
        for chunk in chunks:
            for tensor in weights(chunk).values():
                tensor.uniform_(2.0, 3.0)
    return chunks


def weights(chunk: GPTModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in chunk.state_dict().items() if isinstance(tensor, Tensor)}


def sharded(chunks: list[GPTModel]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def same_bits(one: Tensor, other: Tensor) -> bool:
    both = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and both[0].equal(both[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
