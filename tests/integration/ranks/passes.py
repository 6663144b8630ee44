"""What one pass of a model or of its head gives: values and gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.algo.pack import Pack, pack
from asyncrl.config import TrainerConfig
from asyncrl.models.families import choosing_biases
from asyncrl.parallel import Parallel
from asyncrl.trainer import model as megatron
from asyncrl.trainer.head import Head
from asyncrl.trainer.network import forward, head_weight
from asyncrl.weights.export import save_hf
from asyncrl.weights.layouts import dims_of
from asyncrl.weights.loading import load
from asyncrl.weights.reshard import Resharder
from tests.integration.families import factors, groups
from tests.integration.ranks.joining import joined, met

# --- model families -------------------------------------------------------------------------------------------------


def families(folder: Path, layout: str) -> None:
    """Write the logits of a batch for each model that FOLDER/LAYOUT.json names, and the gradient of a fixed function of
    them under its HF names: both must be those of transformers. Writes the export of each, too."""
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    parallel = joined(trainer)
    mine = range(len(groups()))[parallel.dp_rank :: parallel.dp]
    batch = pack([groups()[g] for g in mine], multiple=parallel.tp)
    for name in settings["models"]:
        rank = Pass(folder / name, trainer, parallel)
        logits = rank.run(batch, torch.cat([factors(g, rank.vocab) for g in mine]))
        save_hf(folder / f"{layout}-{name}", folder / name, rank.weights, parallel, "float32")
        exported = {**rank.gradients(), **rank.choosing_biases()}
        out = str(folder / f"{layout}-{name}")
        if parallel.tp_rank == 0 and parallel.is_last_stage:
            save_file({"logits": logits[0]}, f"{out}-{parallel.dp_rank}.logits")
        if parallel.exports:
            save_file(exported, f"{out}-{parallel.pp_rank}.gradients")


class Pass:
    """One model on this rank."""

    def __init__(self, folder: Path, trainer: TrainerConfig, parallel: Parallel) -> None:
        self.parallel = parallel
        hf = megatron.read_hf_config(folder)
        self.vocab = hf["vocab_size"]
        self.config = megatron.transformer_config(hf, trainer)
        self.model = megatron.build_model(hf, self.config)
        self.weights = Resharder([self.model], hf["architectures"][0], dims_of(hf), parallel)
        load(self.weights, folder)
        plain = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.wrapped = DistributedDataParallel(self.config, plain, self.model)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.wrapped.train()

    def run(self, batch: Pack, factor: Tensor) -> list[Tensor]:
        """Return the logits [T, vocab] of every target on the last stage.

        The gradient of their weighted sum stays in main_grad.
        """
        found: list[Tensor] = []

        def forward_step(packs: Iterator[Pack], wrapped: torch.nn.Module) -> tuple[Tensor, Any]:
            one = next(packs)

            def loss_function(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                hidden = copy_to_tensor_model_parallel_region(hidden[0][one.row_of_target])
                mine = hidden @ head_weight(self.model).t()
                found.append(self._whole(mine.detach()))
                start = self.parallel.tp_rank * mine.shape[1]
                factor_here = factor[:, start : start + mine.shape[1]]
                loss = (mine[:, : factor_here.shape[1]] * factor_here).sum()
                return loss, torch.zeros((), dtype=torch.int), {}

            return forward(wrapped, self.model, one), loss_function

        self.wrapped.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=self.wrapped,
            num_microbatches=1,
            seq_length=batch.num_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        return found

    def _whole(self, logits: Tensor) -> Tensor:
        """Gather the columns of all tensor-parallel ranks, without padding."""
        parts = [torch.empty_like(logits) for _ in range(self.parallel.tp)]
        dist.all_gather(parts, logits.contiguous(), group=self.parallel.tp_group)
        return torch.cat(parts, 1)[:, : self.vocab].contiguous()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by HF name on the exporting rank.

        They replace the weights and are exported like these.
        """
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.main_grad)
        return {name: tensor.clone() for name, tensor in self.weights.hf_tensors()}

    def choosing_biases(self) -> dict[str, Tensor]:
        """Return the routers' biases after training, and after the cast to mixed precision."""
        self.model.bfloat16()
        return {name: tensor.clone() for name, tensor in self.weights.hf_tensors() if name.endswith(choosing_biases())}


# --- the head -------------------------------------------------------------------------------------------------------

STEP = 1e-5


def head(
    given: dict[str, Tensor], vocab: int, temperature: float, chunk_rows: dict[str, int]
) -> dict[str, dict[str, Tensor]]:
    """Return values and gradients of the head over the whole vocabulary, for each number of rows that it computes at a
    time, and central differences: they must be those of one process. `given` has hidden states, the whole weight and
    targets, of which every rank takes its part."""
    met()
    part = VocabularyPart(given, vocab, temperature)
    outcomes = {name: part.run(rows) for name, rows in chunk_rows.items()}
    return {**outcomes, "differences": part.differences(chunk_rows["chunks"])}


class VocabularyPart:
    """The vocabulary-parallel head of a rank, with its columns of the weight."""

    def __init__(self, given: dict[str, Tensor], vocab: int, temperature: float) -> None:
        self.given = given
        self.vocab = vocab
        self.temperature = temperature
        self.tp = dist.get_world_size()
        rank = dist.get_rank()
        self.parallel: Any = SimpleNamespace(cp=1, tp=self.tp, tp_rank=rank, tp_group=dist.group.WORLD)
        self.columns = -(-self.vocab // self.tp)
        self.first = rank * self.columns

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the weight, [vocab, H] -> [V / tp, H].

        The padding has values that must not affect results.
        """
        padded = torch.cat([whole, torch.full((self.columns * self.tp - self.vocab, whole.shape[1]), 9.0)])
        return padded[self.first : self.first + self.columns].clone()

    def value(self, hidden: Tensor, weight: Tensor, chunk_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, entropy, and a function of both."""
        pack: Any = SimpleNamespace(row_of_target=self.given["rows"], targets=self.given["targets"])
        head = Head(hidden, weight, self.vocab, chunk_rows, self.parallel)
        logprobs, entropy = head.score(pack, self.temperature, entropy=True)
        assert entropy is not None
        total = (self.given["of_logprobs"] * logprobs).sum() + (self.given["of_entropy"] * entropy.square()).sum()
        return logprobs, entropy, total

    def run(self, chunk_rows: int) -> dict[str, Tensor]:
        """Return the values that the test compares."""
        hidden = self.given["hidden"].clone().requires_grad_()
        weight = self.part(self.given["weight"]).requires_grad_()
        logprobs, entropy, total = self.value(hidden, weight, chunk_rows)
        total.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        parts = [torch.empty_like(weight.grad) for _ in range(self.tp)]
        dist.all_gather(parts, weight.grad)
        return {
            "logprobs": logprobs.detach(),
            "entropy": entropy.detach(),
            "hidden": hidden.grad,
            "weight": torch.cat(parts),
        }

    @torch.no_grad()
    def differences(self, chunk_rows: int) -> dict[str, Tensor]:
        """Return the same gradients by finite differences: one number is changed at a time, on all ranks."""
        found = {}
        for name in ("hidden", "weight"):
            gradient = torch.zeros_like(self.given[name])
            for place in range(gradient.numel()):
                sides = []
                for step in (STEP, -STEP):
                    moved = {key: self.given[key].clone() for key in ("hidden", "weight")}
                    moved[name].view(-1)[place] += step
                    sides.append(self.value(moved["hidden"], self.part(moved["weight"]), chunk_rows)[2])
                gradient.view(-1)[place] = (sides[0] - sides[1]) / (2 * STEP)
            found[name] = gradient
        return found
