"""One rank of test_adam.py: python rank_adam.py FOLDER, under torchrun.

Trains FOLDER with torch's AdamW and with TransformerEngine's FusedAdam, which Megatron takes on GPUs: an update,
another one, one after the moments were reset, and the second one again from a copy of the state. Asserts that the
weights agree.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import msgspec
import torch
import transformer_engine.pytorch as te
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from asyncrl.config import Config, read
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer.parallel import initialize
from asyncrl.trainer.policy import Policy
from tests.te_stub.stand_in import CALLS


def weights(policy: Policy) -> list[Tensor]:
    return [parameter.detach().float().clone() for parameter in policy.network.parameters()]


def trained(config: Config, folder: Path, groups: list[Group], parallel: Parallel) -> list[list[Tensor]]:
    """Return the weights after each of the four updates."""
    policy, found = Policy(config, folder / "model", parallel), []
    optimizer = policy._optimizer
    policy.update(Batch(0, groups, {}))
    found.append(weights(policy))
    state = [(s.master.clone(), {n: m.clone() for n, m in s.moments.items()}) for s in optimizer.shards()]
    counters = policy.counters()
    policy.update(Batch(1, groups, {}))
    found.append(weights(policy))
    optimizer.start_anew()
    policy.update(Batch(2, groups, {}))
    found.append(weights(policy))

    again = Policy(config, folder / "model", parallel)
    with torch.no_grad():
        for parameter, value in zip(again.network.parameters(), found[0], strict=True):
            parameter.copy_(value)
        for shard, (master, moments) in zip(again._optimizer.shards(), state, strict=True):
            shard.master.copy_(master)
            for name, moment in moments.items():
                shard.moments[name].copy_(moment)
    again.restore(counters, [])
    again.update(Batch(1, groups, {}))
    assert all(one.equal(two) for one, two in zip(weights(again), found[1], strict=True)), "the state was not restored"
    return found


def main(folder: Path) -> None:
    config = read(folder)
    parallel = initialize(config.trainer, gpu=False, seed=0, timeout=60.0)
    groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
    expected = trained(config, folder, groups, parallel)
    fused: Any = te.optimizers.FusedAdam
    megatron_optimizer.Adam = distrib_optimizer.Adam = fused
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    found = trained(config, folder, groups, parallel)
    assert CALLS["multi_tensor_adam"] > 0
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for one, two in zip(mine, theirs, strict=True):
            tolerance = (
                {"rtol": 1e-2, "atol": 1e-4} if config.trainer.dtype == "bfloat16" else {"rtol": 0, "atol": 1e-6}
            )
            torch.testing.assert_close(one, two, **tolerance, msg=lambda text, n=number: f"update {n}: {text}")
        if number:
            assert not all(one.equal(two) for one, two in zip(mine, found[number - 1], strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
