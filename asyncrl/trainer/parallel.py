"""Setup of the process groups: the only file that asks Megatron for ranks and groups."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from asyncrl.config import TrainerConfig
from asyncrl.network import stores
from asyncrl.parallel import Parallel


def initialize(trainer: TrainerConfig, *, gpu: bool, seed: int, timeout: float) -> Parallel:
    """Join the run's process group (from torchrun's environment variables) and split it into Megatron's groups.

    `timeout` in seconds bounds every collective: after it the peers of a dead rank give up.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(trainer.threads)
    stores.bind()
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout))
    if dist.get_world_size() != trainer.world_size:
        raise ValueError(f"{dist.get_world_size()} ranks were started for a layout of {trainer.world_size}")
    return split(trainer, device, seed)


def host_group(timeout: float) -> dist.ProcessGroup | None:
    """Return one more group of all ranks, whose collectives wait on the host and need not be in order with those of
    other groups; None for a single rank. Every rank must call it."""
    if dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def split(trainer: TrainerConfig, device: torch.device, seed: int) -> Parallel:
    """Split the run's process group into Megatron's groups. Returns this rank's position in them."""
    parallel_state.initialize_model_parallel(
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel,
    )
    reseed(seed)
    return Parallel(
        rank=dist.get_rank(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        edp_rank=parallel_state.get_expert_data_parallel_rank(),
        device=device,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        expert_group=parallel_state.get_expert_tensor_and_model_parallel_group(),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        cp_group=parallel_state.get_context_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
    )


def reseed(seed: int) -> None:
    """Seed the random numbers of dropout: those that all ranks of a layer share, and those that differ between them."""
    model_parallel_cuda_manual_seed(seed)
