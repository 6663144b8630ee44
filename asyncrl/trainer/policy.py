"""The policy in training: model, optimizer, and one update from one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from asyncrl.algo.loss import LOSSES, LossParams
from asyncrl.algo.pack import Pack, micro_batches, pack, spread
from asyncrl.algo.samples import Sample, build_samples
from asyncrl.config import Config
from asyncrl.errors import BadStep
from asyncrl.parallel import Parallel
from asyncrl.trainer import model as megatron
from asyncrl.trainer.logprobs import token_entropy, token_logprobs
from asyncrl.types import Group
from asyncrl.weights.layouts import dims_of
from asyncrl.weights.reshard import Resharder


@dataclass
class _Sums:
    """Statistics of the trained tokens, summed over micro-batches and ranks."""

    loss: float = 0.0
    tokens: float = 0.0
    gap: float = 0.0  # |log pi_trainer - log pi_engine|
    gap_max: float = 0.0
    kl: float = 0.0  # k3 estimate of KL(engine || trainer)
    capped: float = 0.0  # tokens whose correction was truncated
    entropy: float = 0.0
    packed: float = 0.0  # tokens that went through the model

    def reduced(self, parallel: Parallel) -> _Sums:
        """The same on every rank. Only one rank of each replica's last stage counts."""
        mine = [self.loss, self.tokens, self.gap, self.kl, self.capped, self.entropy, self.packed]
        sums = torch.tensor(mine, dtype=torch.float64) * parallel.counts
        largest = torch.tensor(self.gap_max, dtype=torch.float64) * parallel.counts
        if dist.get_world_size() > 1:
            sums, largest = sums.to(parallel.device), largest.to(parallel.device)
            dist.all_reduce(sums)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        loss, tokens, gap, kl, capped, entropy, packed = sums.tolist()
        return _Sums(loss, tokens, gap, float(largest), kl, capped, entropy, packed)


class Policy:
    """Megatron's GPT under data parallelism, with fp32 master weights. One per rank.

    Under virtual pipelining a rank holds several chunks of layers, each a model of its own.
    """

    def __init__(self, config: Config, folder: Path, parallel: Parallel) -> None:
        self.config, self.parallel = config, parallel
        self.hf = megatron.read_hf_config(folder)
        self._megatron_config = megatron.transformer_config(self.hf, config.trainer)
        stages = range(config.trainer.virtual_pipeline) if config.trainer.virtual_pipeline > 1 else [None]
        chunks = [megatron.build_model(self.hf, self._megatron_config, stage).to(parallel.device) for stage in stages]
        half = config.trainer.dtype == "bfloat16"
        inner = [Float16Module(self._megatron_config, chunk) for chunk in chunks] if half else chunks
        self.weights = Resharder(chunks, self.hf["architectures"][0], dims_of(self.hf), parallel)
        self.weights.load(folder)  # after the cast, which could round what stays float32
        sharded = parallel.dp > 1  # with one replica the distributed optimizer only adds copies of the whole buffer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        for chunk in chunks:
            _mark_experts(chunk)
        self._wrapped = [DistributedDataParallel(self._megatron_config, ddp, module) for module in inner]
        self._inner = dict(zip(self._wrapped, chunks, strict=True))
        self._optimizer = self._build_optimizer(half, sharded)
        self._schedule = self._build_schedule()
        # Two stages are each other's next and previous: without overlap one batch would mix both directions' shapes.
        self._megatron_config.overlap_p2p_comm = len(chunks) > 1
        self._megatron_config.finalize_model_grads_func = finalize_model_grads
        self._megatron_config.grad_scale_func = self._optimizer.scale_loss
        for chunk in self._wrapped:
            chunk.train()
        self._bad_steps = 0

    # -- one update ----------------------------------------------------------------------------------------

    def update(self, groups: list[Group]) -> dict[str, float]:
        """One optimizer step on one batch. Returns the step's figures, the same on every rank."""
        algo = self.config.algo
        samples = build_samples(
            groups,
            advantage=algo.advantage,
            aggregation=algo.aggregation,
            longest=self.config.rollout.max_new_tokens,
        )
        # without advantage a sample has no gradient: it stays in the denominator and is not run
        if algo.entropy_bonus == 0.0:
            samples = [group for group in samples if any(sample.advantage != 0.0 for sample in group)]
        figures = {"groups/trained": float(len(samples)), "lr": self._lr()}
        if not samples:
            return {**figures, **_figures(_Sums()), "grad_norm": 0.0, "step/skipped": 1.0, "step/bad": 0.0}
        sums = self._forward_backward(self._packs(samples)).reduced(self.parallel)
        grad_norm, applied = self._step()
        return {
            **figures,
            **_figures(sums),
            "grad_norm": grad_norm,
            "step/skipped": float(not applied),
            "step/bad": float(not applied),
        }

    def _packs(self, samples: list[list[Sample]]) -> list[Pack]:
        """This data-parallel rank's micro-batches, of which every rank has at least one.

        One token of zero weight fills places without work: ranks that share experts meet in every micro-batch, and
        interleaved stages run whole rounds.
        """
        trainer, p = self.config.trainer, self.parallel
        shares = [
            micro_batches(share, trainer.micro_batch_tokens, trainer.share_prompts)
            for share in spread(samples, p.dp, trainer.share_prompts)
        ]
        experts_cross_replicas = p.tp % (p.etp * p.ep) != 0
        count = max(len(share) for share in shares) if experts_cross_replicas else max(1, len(shares[p.dp_rank]))
        if trainer.virtual_pipeline > 1:
            count += -count % p.pp
        idle = [[Sample([0], [0], [True], [0.0], 0.0, 0.0)]]
        batches = shares[p.dp_rank] + [idle] * (count - len(shares[p.dp_rank]))
        multiple = p.tp if trainer.sequence_parallel else 1
        return [pack(batch, share=trainer.share_prompts, multiple=multiple).to(p.device) for batch in batches]

    def _forward_backward(self, packs: list[Pack]) -> _Sums:
        """Accumulate the gradient of all micro-batches."""
        sums = _Sums(packed=float(sum(p.num_tokens for p in packs)))
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

        def forward_step(batches: Iterator[Pack], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)

            def loss_function(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss = self._loss(logits[0], batch, sums)
                # zero tokens: Megatron must not divide again, the weights hold the step's one denominator
                return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach()}

            return megatron.forward(model, self._inner[model], batch), loss_function

        interleaved = len(self._wrapped) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(packs) for _ in self._wrapped] if interleaved else iter(packs),
            model=self._wrapped if interleaved else self._wrapped[0],
            num_microbatches=len(packs),
            seq_length=max(p.num_tokens for p in packs),
            micro_batch_size=1,
            forward_only=False,
        )
        return sums

    def _loss(self, logits: Tensor, batch: Pack, sums: _Sums) -> Tensor:
        """Sum over this micro-batch's tokens of weight * loss; the weights carry the step's denominator."""
        algo = self.config.algo
        where = {
            "vocab": self.hf["vocab_size"],
            "temperature": self.config.rollout.temperature,
            "parallel": self.parallel,
        }
        logprobs, log_z = token_logprobs(logits, batch, **where)
        proximal, trained = logprobs.detach(), batch.weights > 0
        params = LossParams(algo.clip_low, algo.clip_high, algo.correction_cap)
        losses = LOSSES[algo.loss](logprobs, proximal, batch.behaviour, batch.advantages, params)
        if algo.entropy_bonus:
            entropy = token_entropy(logits, log_z, batch, **where)
            losses = losses - algo.entropy_bonus * entropy
            sums.entropy += float((entropy.detach() * trained).sum())
        loss = (batch.weights * losses).sum()
        gap = proximal - batch.behaviour
        sums.loss += float(loss.detach())
        sums.tokens += int(trained.sum())
        sums.gap += float((gap.abs() * trained).sum())
        sums.gap_max = max(sums.gap_max, float((gap.abs() * trained).amax()) if len(gap) else 0.0)
        sums.kl += float(((gap.exp() - 1 - gap) * trained).sum())
        sums.capped += int(((gap > math.log(algo.correction_cap)) & trained).sum())
        return loss

    def _step(self) -> tuple[float, bool]:
        """Apply the gradient, unless it is bad. Returns its norm before clipping, and whether it was applied."""
        trainer = self.config.trainer
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        bad = not math.isfinite(norm) or (trainer.bad_grad_norm is not None and norm > trainer.bad_grad_norm)
        if bad:
            self._bad_steps += 1
            if trainer.on_bad_step == "stop" or self._bad_steps >= trainer.max_bad_steps:
                raise BadStep(self._bad_step(norm))
            return norm, False
        self._bad_steps = 0
        if trainer.optimizer.clip_grad > 0:
            for optimizer in self._parts():
                if parameters := optimizer.get_parameters():  # a stage may hold no expert
                    clip_grad_by_total_norm_fp32(parameters, max_norm=trainer.optimizer.clip_grad, total_norm=norm)
        self._optimizer.step_with_ready_grads()
        self._schedule.step(increment=1)
        return norm, True

    def _bad_step(self, norm: float) -> str:
        t = self.config.trainer
        return (
            f"gradient norm {norm}, bad step {self._bad_steps} in a row (trainer.bad_grad_norm={t.bad_grad_norm}, "
            f"trainer.on_bad_step={t.on_bad_step}, trainer.max_bad_steps={t.max_bad_steps}). "
            "Lower trainer.optimizer.lr, or look at reward and logprob_gap of the last steps in metrics.jsonl."
        )

    # -- construction --------------------------------------------------------------------------------------

    def _build_optimizer(self, half: bool, sharded: bool) -> Any:
        settings = self.config.trainer.optimizer
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip_grad,
                bf16=half,
                params_dtype=getattr(torch, self.config.trainer.dtype),
                use_distributed_optimizer=sharded,
            ),
            self._wrapped,
        )
        self._optimizer = optimizer
        if self.parallel.device.type == "cpu":
            for part in self._parts():  # torch's default loops over tensors; fused halves the optimizer's time
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False
        return optimizer

    def _parts(self) -> list[Any]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _build_schedule(self) -> OptimizerParamScheduler:
        settings = self.config.trainer.optimizer
        schedule = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr if settings.schedule != "constant" else 0.0,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=settings.decay_steps or self.config.run.max_steps,
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        schedule.step(increment=1)  # update k takes the rate of step k: none is spent at a warm-up's zero
        return schedule

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _mark_experts(chunk: torch.nn.Module) -> None:
    """Sum the gradients of routed experts over their own replicas. Megatron 0.16 marks them under expert parallelism
    only, and would sum shards that differ, or miss tokens, where expert_tensor_parallel is not tensor_parallel."""
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _figures(sums: _Sums) -> dict[str, float]:
    tokens = max(1.0, sums.tokens)
    return {
        "loss": sums.loss,
        "tokens/trained": sums.tokens,
        "tokens/packed": sums.packed,
        "logprob_gap/mean": sums.gap / tokens,
        "logprob_gap/max": sums.gap_max,
        "logprob_gap/kl": sums.kl / tokens,
        "correction/capped": sums.capped / tokens,
        "entropy": sums.entropy / tokens,
    }
