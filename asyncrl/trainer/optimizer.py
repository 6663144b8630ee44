"""AdamW with fp32 master weights, its learning-rate schedule, the rejection of steps with a bad gradient, and periodic
resets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from asyncrl.config import TrainerConfig
from asyncrl.errors import BadStep
from asyncrl.trainer.moments import Shard, format_of, is_torchs, shards_of
from asyncrl.trainer.network import Network


class StatesMemory:
    """Where an optimizer's states are: on the device. An extension may set one that moves them
    (NetworkOptimizer.memory)."""

    def bring(self) -> None:
        """Have the states on the device. Called before they are read or written."""

    def leave(self) -> None:
        """Let the states leave the device until they are needed. Called before the passes of a step, and after it."""


class NetworkOptimizer:
    """The optimizer of one network. The decay ends at `max_steps` unless decay_steps is set."""

    memory: StatesMemory = StatesMemory()

    def __init__(self, trainer: TrainerConfig, network: Network, max_steps: int) -> None:
        self._trainer = trainer
        self._network = network
        settings = trainer.optimizer
        arguments = {
            "optimizer": "adam",
            "lr": settings.lr,
            "min_lr": settings.min_lr,
            "adam_beta1": settings.beta1,
            "adam_beta2": settings.beta2,
            "adam_eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "clip_grad": settings.clip_grad,
            "bf16": trainer.dtype == "bfloat16",
            "params_dtype": getattr(torch, trainer.dtype),
            "use_distributed_optimizer": network.sharded,
            "timers": network.meter,
            **format_of(settings.moments_dtype),
        }
        config = OptimizerConfig(**arguments)
        overrides = _overrides(config, network.encoder.rates)
        self._optimizer: Any = get_megatron_optimizer(config, network.wrapped, overrides)
        network.config.grad_scale_func = self._optimizer.scale_loss
        on_cpu = next(network.parameters()).device.type == "cpu"
        self._fused = on_cpu and all(is_torchs(part.optimizer) for part in self._parts())
        if self._fused:
            for part in self._parts():  # torch's default loops over tensors; fused halves the optimizer's time
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr if settings.schedule != "constant" else 0.0,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=settings.decay_steps or max_steps,
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        # update k takes the rate of step k, so that no update is wasted on the warm-up's zero
        self._schedule.step(increment=1)
        self._bad_steps = 0
        self._applied = 0  # steps since the moments were zero

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Reset the gradients before those of a step are accumulated."""
        self._optimizer.zero_grad()
        self.memory.leave()  # after the start or a checkpoint

    def step(self) -> tuple[float, bool]:
        """Apply the gradient, unless it is bad. Returns its norm before clipping, and whether it was applied. Raises
        BadStep as configured."""
        with self._network.meter.span("optimizer"):
            self.memory.bring()
            found = self._step()
            self.memory.leave()
            return found

    def _step(self) -> tuple[float, bool]:
        trainer = self._trainer
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        bad = not math.isfinite(norm) or (trainer.bad_grad_norm is not None and norm > trainer.bad_grad_norm)
        if bad:
            self._bad_steps += 1
            if trainer.on_bad_step == "stop" or self._bad_steps >= trainer.max_bad_steps:
                raise BadStep(self._describe(norm))
            return norm, False
        self._bad_steps = 0
        if trainer.optimizer.clip_grad > 0:
            self._clip(norm, trainer.optimizer.clip_grad)
        self._optimizer.step_with_ready_grads()
        self._schedule.step(increment=1)
        self._applied += 1
        return norm, True

    def start_anew(self) -> None:
        """Start again from weights that were changed from outside: copy them to the master weights, and forget the
        moments."""
        self.memory.bring()
        self._optimizer.reload_model_params()
        for part in self._parts():
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # of Apex and TransformerEngine, see _count
        self._applied = 0

    def states(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer that take memory: masters, and the moments that exist."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())

    # -- what a checkpoint holds ---------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """Yield the optimizer state itself, not a copy: writing to it restores a checkpoint. Moments that AdamW has not
        created yet are zero."""
        self.memory.bring()
        for part in self._parts():
            yield from shards_of(part, self._trainer.optimizer.moments_dtype, self._applied, fused=self._fused)

    def counters(self) -> dict[str, int]:
        """Return the counters of the schedule, the bias correction and the consecutive bad steps."""
        return {"applied": self._applied, "scheduled": self._schedule.num_steps, "bad_steps": self._bad_steps}

    def restore(self, counters: dict[str, int]) -> None:
        """Restore the values that `counters` returned, after the moments were written into `shards`."""
        self._applied = counters["applied"]
        self._bad_steps = counters["bad_steps"]
        self._schedule.step(increment=counters["scheduled"] - self._schedule.num_steps)
        for _ in self.shards():  # sets the step count of each
            pass

    # -- internals -----------------------------------------------------------------------------------------

    def _clip(self, norm: float, most: float) -> None:
        """Clip the gradient as Megatron does. torch's fused AdamW scales gradients as it reads them, without an extra
        pass."""
        for part in self._parts():
            if self._fused:
                part.optimizer.grad_scale = torch.tensor(max(1.0, (norm + 1e-6) / most))  # AdamW divides by it
            elif parameters := part.get_parameters():  # a stage may hold no expert
                clip_grad_by_total_norm_fp32(parameters, max_norm=most, total_norm=norm)

    def _parts(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _describe(self, norm: float) -> str:
        t = self._trainer
        return (
            f"gradient norm {norm}, bad step {self._bad_steps} in a row (trainer.bad_grad_norm={t.bad_grad_norm}, "
            f"trainer.on_bad_step={t.on_bad_step}, trainer.max_bad_steps={t.max_bad_steps}). "
            "Lower trainer.optimizer.lr, or look at reward and logprob_gap of the last steps in metrics.jsonl."
        )


def _overrides(config: OptimizerConfig, rates: Mapping[str, float]) -> dict[ParamKey, Any]:
    """Return what Megatron's optimizer does differently for some parameters: by default no weight decay of norms and
    biases, and the peak learning rates of these patterns of names."""
    found: dict[ParamKey, Any] = get_standard_config_overrides(config)
    return found | {ParamKey(name=pattern): {"max_lr": rate} for pattern, rate in rates.items()}
