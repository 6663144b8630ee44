"""Log-probabilities and entropy from logits that are split over the tensor-parallel ranks, in float32.

Built from Megatron's all-reduces (identity backward), so autograd does the rest: the gradient of log Z with respect to
the local logits is the local softmax, which needs no communication.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.parallel import Parallel


def mask_padding(logits: Tensor, vocab: int, parallel: Parallel) -> Tensor:
    """Columns beyond the vocabulary must not enter the softmax: they exist only to split it evenly."""
    columns = logits.shape[-1]
    first = parallel.tp_rank * columns
    if first + columns <= vocab:
        return logits
    beyond = torch.arange(first, first + columns, device=logits.device) >= vocab
    return logits.masked_fill(beyond, -1e30)  # not -inf: 0 * inf is NaN in the entropy's gradient


def token_logprobs(
    logits: Tensor, pack: Pack, *, vocab: int, temperature: float, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """logits [U, V / tp] -> log pi of each target [T], and log Z of each row [U].

    log_softmax(logits / temperature), as the engine reports it (SGLang, srt/layers/sampler.py).
    """
    scaled = scale(logits, vocab, temperature, parallel)
    log_z = log_partition(scaled, parallel)
    first = parallel.tp_rank * scaled.shape[-1]
    local = pack.targets - first
    mine = (local >= 0) & (local < scaled.shape[-1])
    chosen = scaled[pack.row_of_target, local.clamp(0, scaled.shape[-1] - 1)] * mine
    if parallel.tp > 1:
        chosen = reduce_from_tensor_model_parallel_region(chosen)
    return chosen - log_z[pack.row_of_target], log_z


def scale(logits: Tensor, vocab: int, temperature: float, parallel: Parallel) -> Tensor:
    """Float32 logits over the temperature, without the padding of the vocabulary."""
    logits = mask_padding(logits.float(), vocab, parallel)
    return logits if temperature == 1.0 else logits / temperature


def log_partition(scaled: Tensor, parallel: Parallel) -> Tensor:
    """log of the sum of exp over the whole vocabulary, [U]."""
    if parallel.tp == 1:
        return torch.logsumexp(scaled, -1)
    largest = scaled.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel.tp_group)
    total = reduce_from_tensor_model_parallel_region((scaled - largest[:, None]).exp().sum(-1))
    return largest + total.log()


def token_entropy(
    logits: Tensor, log_z: Tensor, pack: Pack, *, vocab: int, temperature: float, parallel: Parallel
) -> Tensor:
    """Entropy of the distribution that each target was drawn from, [T]: log Z - E[logit]."""
    scaled = scale(logits, vocab, temperature, parallel)
    # every rank's part of the mean depends on log Z: its gradient is the sum over the parts
    shared = copy_to_tensor_model_parallel_region(log_z) if parallel.tp > 1 else log_z
    mean = ((scaled - shared[:, None]).exp() * scaled).sum(-1)
    if parallel.tp > 1:
        mean = reduce_from_tensor_model_parallel_region(mean)
    return (log_z - mean)[pack.row_of_target]
