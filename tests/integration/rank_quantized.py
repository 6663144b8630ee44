"""One trainer rank of test_quantized.py: python rank_quantized.py FOLDER LAYOUT, under torchrun.

For each model of FOLDER/LAYOUT.json it compares a network on a quantized base with one on the dequantized weights as a
model of their own, which it writes to FOLDER/LAYOUT-NAME. It reports the bytes of the frozen base.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack  # noqa: E402
from asyncrl.config import TrainerConfig  # noqa: E402
from asyncrl.errors import RecordError  # noqa: E402
from asyncrl.extensions.lora.transformation import Adapted  # noqa: E402
from asyncrl.extensions.lora.weights import AdapterWeights  # noqa: E402
from asyncrl.extensions.qlora import stored as packed_base  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.trainer.head import Head  # noqa: E402
from asyncrl.trainer.network import Network  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from tests.integration.rank_lora import scored  # noqa: E402
from tests.integration.updates import drawn_samples, token_weights  # noqa: E402


def passes(network: Network, parallel: Parallel) -> list[Tensor]:
    """Return log-probabilities and gradients with random adapters."""
    draw = torch.Generator().manual_seed(3)
    AdapterWeights(network.weights).load(lambda name, shape: torch.randn(*shape, generator=draw) * 0.1)

    def visit(head: Head, one: Pack) -> Tensor:
        return -(token_weights()[one.table_rows] * head.score(one, 1.0)[0]).sum()

    found = [scored(network, parallel)]
    network.train(network.packs(drawn_samples()), visit)
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


def main(folder: Path, layout: str) -> None:
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    plain = trainer.model_copy(update={"lora": trainer.lora.model_copy(update={"base": "none"})})
    parallel = initialize(trainer, gpu=False, seed=0, timeout=120.0)
    told = {}
    for name in settings["models"]:
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
    (folder / f"{layout}-{parallel.rank}.told").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
