"""One trainer rank of test_sft.py: python rank_sft.py FOLDER, under torchrun.

Trains one batch of mode=sft in float64 in every layout for as many processes as it finds, and writes the loss and the
gradients by HF names, as rank_losses.py does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from asyncrl.config import read  # noqa: E402
from asyncrl.schema import decode_batch  # noqa: E402
from asyncrl.trainer import network, policy  # noqa: E402
from asyncrl.trainer.parallel import split  # noqa: E402
from tests.fakes import in_parts  # noqa: E402
from tests.integration.rank_losses import Descent, in_float64  # noqa: E402

LAYOUTS = {
    1: {"single": {}, "unshared": {"share_prompts": False}, "parts": {"batch_parts": 2, "micro_batch_tokens": 48}},
    2: {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}, "dp2": {"data_parallel": 2}},
}


def main(folder: Path) -> None:
    own = network.DistributedDataParallelConfig
    network.DistributedDataParallelConfig = lambda **_: own()  # type: ignore[assignment, misc]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout, settings in LAYOUTS[dist.get_world_size()].items():
        config = in_float64(read(folder), settings)
        where = split(config.trainer, torch.device("cpu"), 0)
        trained = network.Network(config.trainer, folder / "model", where)
        descent = Descent(trained, where)
        policy.Network = lambda *_, trained=trained, **__: trained  # type: ignore[assignment, misc]
        policy.NetworkOptimizer = lambda *_, descent=descent: descent  # type: ignore[assignment, misc]
        one = policy.Policy(config, folder / "model", where)
        given = one.batches(lambda: pytest.fail("supervised training asked for a server of batches"))
        assert given
        data = [given.batch(0, interrupt=lambda: False) if where.is_first else b""]
        dist.broadcast_object_list(data, src=0)
        parts = in_parts(decode_batch(data[0]), config.trainer.batch_parts)
        figures = [one.update(part) for part in parts][-1]
        if where.exports:
            save_file(descent.gradients[0], folder / f"{layout}-{where.pp_rank}.safetensors")
        if where.is_first:
            (folder / f"{layout}.json").write_text(json.dumps(figures))
            (folder / f"{layout}.batch").write_bytes(data[0])
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
