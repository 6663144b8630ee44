"""Master weights and moments as Megatron's optimizers hold them: what a checkpoint stores, and fills again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """Elements [start, start + N) of a flattened parameter that this rank's optimizer holds."""

    parameter: Tensor
    start: int
    master: Tensor  # [N] float32
    moments: dict[str, Tensor]  # [N] each, in trainer.optimizer.moments_dtype


def shards_of(part: Any, dtype: str, applied: int, *, fused: bool) -> Iterator[Shard]:
    """Yield the state of a part of Megatron's optimizer itself, not a copy, with moments of this number format. Those
    that AdamW has not created yet are zero. `applied` is the number of steps since they were; torch's AdamW is `fused`
    or not."""
    for parameter, start, master in _masters(part):
        state = part.optimizer.state[master]
        for name in MOMENTS:
            if name not in state:
                _zero(part.optimizer, master, name, dtype)
        set_step_count(part.optimizer, state, applied, fused=fused)
        yield Shard(parameter, start, master.detach().view(-1), {name: state[name].view(-1) for name in MOMENTS})


def is_torchs(optimizer: Any) -> bool:
    """Return whether an optimizer is torch's own, not that of Apex or TransformerEngine."""
    return isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam)


def _masters(part: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield each parameter that a part of Megatron's optimizer updates, with the offset and the float32 values of the
    range that this part holds."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            start = part._get_model_param_range_map(parameter)["param"].start
            yield parameter, start, part.optimizer.param_groups[group]["params"][order]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for halves, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((half, 0, master) for half, master in zip(halves, masters, strict=True))
        yield from ((own, 0, own) for group in part.fp32_from_fp32_groups for own in group)
    else:
        yield from ((own, 0, own) for group in part.optimizer.param_groups for own in group["params"])


def _zero(optimizer: Any, master: Tensor, moment: str, dtype: str) -> None:
    """Create a moment that AdamW has not created yet."""
    if dtype == "float32":
        optimizer.state[master][moment] = torch.zeros_like(master, dtype=torch.float32)
    else:
        optimizer._initialize_state(master, moment, zero_buffer=True)


def set_step_count(optimizer: Any, state: dict[str, Any], applied: int, *, fused: bool) -> None:
    """Set the number of steps used by bias correction. torch's AdamW keeps one per parameter, on the host unless it is
    fused (it reads the number); Apex and TransformerEngine keep one per group."""
    if is_torchs(optimizer):
        state["step"] = torch.tensor(float(applied), device=state[MOMENTS[0]].device if fused else "cpu")
    else:
        for group in optimizer.param_groups:
            group["step"] = applied


def format_of(dtype: str) -> dict[str, Any]:
    """Return the fields of Megatron's configuration for the number format of moments.

    With `fp8_recipe` unset or "delayed", Megatron's precision-aware optimizer would also leave the masters to
    FusedAdam, where `reload_model_params` does nothing: resets and checkpoints need them. The field has no other effect
    on an optimizer whose parameters are not in FP8 (megatron/core/optimizer/optimizer_config.py, __post_init__).
    """
    if dtype == "float32":
        return {}
    moments = {"exp_avg_dtype": getattr(torch, dtype), "exp_avg_sq_dtype": getattr(torch, dtype)}
    return {"use_precision_aware_optimizer": True, "fp8_recipe": "tensorwise", **moments}
