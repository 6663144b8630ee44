"""Chains of trainings, each of which goes on from the checkpoint of the one before."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_chunks

from asyncrl.checkpoints.torch_dist import read_metadata
from asyncrl.config import load
from tests.fakes import changed, compose_values, reusing
from tests.integration.ranks import run_ranks
from tests.integration.updates import Outcome, weights

VERSION = 2
"""The updates before the checkpoint of a link."""
ALGO = {
    "llama-tied": {"advantage": "gae"},  # a critic, and groups that come again
    "qwen3-moe": {},
    "glm4-moe": {},
}


def written(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, unsharded."""
    found: dict[str, torch.Tensor] = {}
    for part in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        state: dict[str, Any] = {
            key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)  # type: ignore[union-attr]
            for key, entry in read_metadata(part).state_dict_metadata.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is one process
            load_chunks(state, checkpoint_id=part, no_dist=True)
        found |= {f"{part.name}/{key}": tensor for key, tensor in state.items()}
    return found


def launch(
    folder: Path,
    model: str,
    number: int,
    trainer: dict[str, Any],
    lora: dict[str, Any] | None = None,
    chain: str = "link",
    roles: dict[str, Any] | None = None,
) -> Outcome:
    """Run link `number` of a model's chain."""
    raw = compose_values("experiment=tiny", "checkpoint.every=1")
    optimizer = {"eps": 1e-3, "schedule": "cosine", "warmup_steps": 2, **trainer.get("optimizer", {})}
    raw["trainer"].update({**trainer, "optimizer": {**raw["trainer"]["optimizer"], **optimizer}})
    raw["trainer"]["lora"].update(lora or {})
    raw["agents"]["roles"] = roles or {}
    changed(raw["algo"], {} if lora else ALGO[model])
    changed(raw, reusing(groups=2) if model == "llama-tied" and not lora else {})
    config = load(raw)
    (folder / model / "config.json").write_text(config.model_dump_json())
    name, source = f"{chain}-{number}", f"{chain}-{number - 1}" if number else None
    figures = run_ranks("recovery:continued", name, source, folder / model, world=config.trainer.world_size)[0]
    return figures, weights(folder / model, name)
