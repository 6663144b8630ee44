"""What Megatron makes of converted checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from asyncrl.config import TrainerConfig
from asyncrl.parallel import Parallel
from tests.integration.ranks.joining import divided, met
from tests.integration.ranks.weights import Cases, chunks_of, loaded, same_bits


def saved_again(folder: Path, base: TrainerConfig, cases: Cases) -> dict[str, dict[str, Any]]:
    """Load every converted checkpoint into a real Megatron model, in every layout of the cases: it must be, bit for
    bit, one that reads the HF folder. Then Megatron saves it to saved-LAYOUT."""
    met()
    found = {}
    for layout, (settings, models) in cases.items():
        trainer = base.model_copy(update=settings)
        with divided(trainer) as parallel:
            for name in models:
                found[f"{layout}/{name}"] = compared(folder / name, layout, trainer, parallel)
    return found


def compared(folder: Path, layout: str, trainer: TrainerConfig, parallel: Parallel) -> dict[str, Any]:
    """Return the names of this rank's tensors, of those that differ from the checkpoint, and of those that it did not
    set."""
    chunks = randomized(chunks_of(folder / "hf", trainer))
    random = {name: tensor.clone() for name, tensor in weights(chunks).items()}
    checkpoint = dist_checkpointing.load(sharded(chunks), str(folder / "megatron"))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(checkpoint[f"model{number}"])
    mine = weights(chunks)
    reference = randomized(chunks_of(folder / "hf", trainer))
    loaded(reference, folder / "hf", parallel)
    expected = weights(reference)
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


def randomized(chunks: list[GPTModel]) -> list[GPTModel]:
    """Set random weights, including norms and biases."""
    with torch.no_grad():
        for tensor in weights(chunks).values():
            tensor.uniform_(2.0, 3.0)
    return chunks


def weights(chunks: list[GPTModel]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in chunk.state_dict().items()
        if isinstance(tensor, Tensor)
    }


def sharded(chunks: list[GPTModel]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
