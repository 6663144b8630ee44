"""Who am I: the only file that asks Megatron for ranks and groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from asyncrl.config import Trainer


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the layout."""

    rank: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0: talks HTTP and writes files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds logits and the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def counts(self) -> bool:
        """The one tensor-parallel rank of each last stage whose sums enter the statistics."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def exports(self) -> bool:
        """The one rank of each pipeline stage that sends and saves weights."""
        return self.dp_rank == 0 and self.tp_rank == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share each matrix."""
        return parallel_state.get_tensor_model_parallel_group()


def initialize(trainer: Trainer, *, gpu: bool, seed: int, timeout: float) -> Parallel:
    """Join the run's process group (torchrun's environment variables name it) and split it into Megatron's.

    `timeout` in seconds bounds every collective: above it the peers of a dead rank give up.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(trainer.threads)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout))
    if dist.get_world_size() != trainer.world_size:
        raise ValueError(f"{dist.get_world_size()} ranks were started for a layout of {trainer.world_size}")
    parallel_state.initialize_model_parallel(trainer.tensor_parallel, trainer.pipeline_parallel)
    model_parallel_cuda_manual_seed(seed)
    return Parallel(
        dist.get_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
        device,
    )
