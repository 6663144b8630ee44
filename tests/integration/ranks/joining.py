"""What functions of ranks share: how they join each other, and what they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.config import Config, TrainerConfig, load
from asyncrl.parallel import Parallel
from asyncrl.schema import Group
from asyncrl.trainer.parallel import initialize, split

PATIENCE = 120.0  # seconds of a collective


def joined(trainer: TrainerConfig, seed: int = 0) -> Parallel:
    """Join the other ranks of a layout, on GPUs where there are some."""
    return initialize(trainer, gpu=torch.cuda.is_available(), seed=seed, timeout=PATIENCE)


def met(timeout: float = PATIENCE) -> None:
    """Join the other ranks, whose layouts come later."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))


@contextmanager
def divided(trainer: TrainerConfig) -> Iterator[Parallel]:
    """Divide the ranks that have met into a layout, and end it."""
    yield split(trainer, torch.device("cpu"), seed=0)
    parallel_state.destroy_model_parallel()


def groups_of(folder: Path) -> list[Group]:
    """Return the groups of the folder's batch."""
    return msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])


def with_settings(config: Config, **changes: dict[str, Any]) -> Config:
    """Return the configuration with other fields of some sections."""
    values = config.model_dump()
    for section, fields in changes.items():
        values.setdefault(section, {}).update(fields)
    return load(values)
