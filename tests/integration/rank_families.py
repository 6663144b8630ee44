"""One trainer rank of a test of model families: python rank_families.py FOLDER LAYOUT, under torchrun.

For each model that FOLDER/LAYOUT.json names, writes the logits of a batch, and the gradient of a fixed function of
them under its HF names, for the test to compare with transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack, pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.models.families import choosing_biases  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer import model as megatron  # noqa: E402
from asyncrl.trainer.network import forward, head_weight  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.weights.export import save_hf  # noqa: E402
from asyncrl.weights.layouts import dims_of  # noqa: E402
from asyncrl.weights.reshard import Resharder  # noqa: E402
from tests.integration.families import factors, groups  # noqa: E402


class Rank:
    """One model on this rank."""

    def __init__(self, folder: Path, trainer: TrainerConfig, parallel: Parallel) -> None:
        self.parallel = parallel
        hf = megatron.read_hf_config(folder)
        self.vocab = hf["vocab_size"]
        self.config = megatron.transformer_config(hf, trainer)
        self.model = megatron.build_model(hf, self.config)
        self.weights = Resharder([self.model], hf["architectures"][0], dims_of(hf), parallel)
        self.weights.load(folder)
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


def main(folder: Path, layout: str) -> None:
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)
    mine = range(len(groups()))[parallel.dp_rank :: parallel.dp]
    batch = pack([groups()[g] for g in mine], multiple=parallel.tp)
    for name in settings["models"]:
        rank = Rank(folder / name, trainer, parallel)
        logits = rank.run(batch, torch.cat([factors(g, rank.vocab) for g in mine]))
        save_hf(folder / f"{layout}-{name}", folder / name, rank.weights, parallel, "float32")
        exported = {**rank.gradients(), **rank.choosing_biases()}
        out = str(folder / f"{layout}-{name}")
        if parallel.tp_rank == 0 and parallel.is_last_stage:
            save_file({"logits": logits[0]}, f"{out}-{parallel.dp_rank}.logits")
        if parallel.exports:
            save_file(exported, f"{out}-{parallel.pp_rank}.gradients")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
