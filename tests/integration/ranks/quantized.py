"""What a network computes on a quantized base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config import TrainerConfig
from asyncrl.errors import RecordError
from asyncrl.extensions.lora.transformation import Adapted
from asyncrl.extensions.lora.weights import AdapterWeights
from asyncrl.extensions.qlora import stored as packed_base
from asyncrl.parallel import Parallel
from asyncrl.trainer.network import Network
from tests.integration.ranks.joining import joined
from tests.integration.ranks.lora import scored
from tests.integration.ranks.updates import weighted_loss
from tests.integration.updates import drawn_samples


def passes(network: Network, parallel: Parallel) -> list[Tensor]:
    """Return log-probabilities and gradients with random adapters."""
    draw = torch.Generator().manual_seed(3)
    AdapterWeights(network.weights).load(lambda name, shape: torch.randn(*shape, generator=draw) * 0.1)

    found = [scored(network, parallel)]
    network.train(network.packs(drawn_samples()), weighted_loss)
    return [*found, *(buffer.clone() for buffer in network.gradients())]


def base_bytes(network: Network) -> int:
    """Return the bytes of what is frozen."""
    frozen = {id(one): one.nbytes for one in network.parameters() if not one.requires_grad}
    return sum(frozen.values()) + sum(one.nbytes for one in network.packed())


def check_kept(run_dir: Path, network: Network, trainer: TrainerConfig, parallel: Parallel) -> None:
    """Store the base, and assert that a resumed run keeps it and refuses another one."""
    kind: Any = trainer.lora.base
    if parallel.is_first:
        run_dir.mkdir()
    dist.barrier()
    found = packed_base.keep(run_dir, None, network.weights, kind, parallel)
    dist.barrier()  # the first rank names the folder
    index = run_dir / packed_base.FOLDER / packed_base.INDEX
    written = index.stat().st_mtime_ns
    assert packed_base.keep(run_dir, run_dir, network.weights, kind, parallel) == found
    assert index.stat().st_mtime_ns == written
    other = run_dir / "other"
    if parallel.is_first:
        (other / "base").mkdir(parents=True)
        (other / "base" / "base.json").write_text(json.dumps({"sha256": "0" * 64}))
    dist.barrier()
    with pytest.raises(RecordError, match=found):
        packed_base.keep(run_dir, other, network.weights, kind, parallel)


def compared(folder: Path, layout: str, trainer: TrainerConfig, models: list[str]) -> dict[str, int]:
    """Assert that a network on a quantized base computes, to the bit, as one on the dequantized weights, which are
    written as a model of their own to FOLDER/LAYOUT-NAME. Returns the bytes of each model's frozen base."""
    plain = trainer.model_copy(update={"lora": trainer.lora.model_copy(update={"base": "none"})})
    parallel = joined(trainer)
    told = {}
    for name in models:
        network = Network(trainer, folder / name, parallel, transformation=Adapted(trainer.lora))
        dense = folder / f"{layout}-{name}"
        base = {key: tensor.contiguous().clone() for key, tensor in network.weights.hf_tensors(merged=None)}
        if parallel.is_first:
            dense.mkdir()
            shutil.copy(folder / name / "config.json", dense)
            save_file(base, dense / "model.safetensors")
        dist.barrier()
        check_kept(folder / f"{layout}-{name}-run", network, trainer, parallel)
        found = passes(network, parallel)
        told[name] = base_bytes(network)
        merged = {key: tensor.clone() for key, tensor in network.weights.hf_tensors()}
        del network
        other = Network(plain, dense, parallel, transformation=Adapted(plain.lora))
        expected = passes(other, parallel)
        assert found[1].abs().max() > 0
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        assert all(torch.equal(tensor, merged[key]) for key, tensor in other.weights.hf_tensors())
    return told
