"""One rank of test_adam.py: python rank_adam.py FOLDER, under torchrun.

Trains FOLDER with torch's AdamW and with TransformerEngine's FusedAdam, which Megatron takes on GPUs: an update,
another one, one after the moments were reset, and the second one again from a checkpoint. Asserts that the weights
agree. With moments in bfloat16, torch's AdamW keeps them in float32, and checkpoints are read with either format.
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
from asyncrl.trainer import sharded
from asyncrl.trainer.parallel import initialize
from asyncrl.trainer.policy import Policy
from tests.fakes import changed
from tests.integration.rank_routing import with_settings
from tests.te_stub.stand_in import CALLS


def weights(policy: Policy) -> list[Tensor]:
    return [parameter.detach().float().clone() for parameter in policy.network.parameters()]


def moments(policy: Policy) -> dict[tuple[str, Any], Tensor]:
    """Return this rank's moments by key and place: optimizers of another kind hold them in another order."""
    pieces = policy.sharded()["policy"].states()
    return {(one.key, one.box.offset): one.tensor.clone() for one in pieces if one.key.startswith("optimizer.")}


def trained(config: Config, folder: Path, groups: list[Group], parallel: Parallel) -> list[list[Tensor]]:
    """Return the weights after each of the three updates."""
    policy, found = Policy(config, folder / "model", parallel), []
    policy.update(Batch(0, groups, {}))
    found.append(weights(policy))
    saved = folder / f"checkpoint-{config.trainer.optimizer.moments_dtype}"
    saved.mkdir(exist_ok=True)
    sharded.write(saved, list(policy.sharded()["policy"].written()), None)
    kept, counters = moments(policy), policy.counters()
    policy.update(Batch(1, groups, {}))
    found.append(weights(policy))
    policy.optimizer.start_anew()
    policy.update(Batch(2, groups, {}))
    found.append(weights(policy))

    again = Policy(config, folder / "model", parallel)
    again.sharded()["policy"].load(saved)
    again.restore(counters, [])
    for place, moment in moments(again).items():
        assert moment.dtype == getattr(torch, config.trainer.optimizer.moments_dtype)
        assert moment.equal(kept[place]), "the moments were not restored"
    again.update(Batch(1, groups, {}))
    assert all(one.equal(two) for one, two in zip(weights(again), found[1], strict=True)), "the state was not restored"
    return found


def read_otherwise(config: Config, folder: Path, parallel: Parallel) -> None:
    """Assert that a checkpoint with moments in bfloat16 is read exactly into float32, and one with float32 rounded to
    the nearest."""
    kinds = {kind: moments_in(config, kind) for kind in ("float32", "bfloat16")}
    for written, read_as in (("bfloat16", "float32"), ("float32", "bfloat16")):
        saved = folder / f"checkpoint-{written}"
        policies = [Policy(kinds[kind], folder / "model", parallel) for kind in (written, read_as)]
        for policy in policies:
            policy.sharded()["policy"].load(saved)
        mine, other = map(moments, policies)
        assert mine.keys() == other.keys()
        assert all(one.dtype == getattr(torch, read_as) for one in other.values())
        assert all(one.to(other[place].dtype).equal(other[place]) for place, one in mine.items())
        assert any(one.any() for one in mine.values())


def moments_in(config: Config, dtype: str) -> Config:
    """Return the configuration with another number format of the moments."""
    return with_settings(config, trainer=changed(config.trainer.model_dump(), {"optimizer.moments_dtype": dtype}))


def main(folder: Path) -> None:
    config = read(folder)
    parallel = initialize(config.trainer, gpu=False, seed=0, timeout=60.0)
    groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
    low = config.trainer.optimizer.moments_dtype != "float32"
    expected = trained(moments_in(config, "float32"), folder, groups, parallel)
    fused: Any = te.optimizers.FusedAdam
    megatron_optimizer.Adam = distrib_optimizer.Adam = fused
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    sys.modules["transformer_engine.pytorch.optimizers"] = te.optimizers  # where Megatron's configuration looks
    found = trained(config, folder, groups, parallel)
    assert CALLS["multi_tensor_adam"] > 0
    if low:
        read_otherwise(config, folder, parallel)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for one, two in zip(mine, theirs, strict=True):
            tolerance = {"rtol": 0, "atol": 1e-6}
            if low or config.trainer.dtype == "bfloat16":
                tolerance = {"rtol": 1e-2, "atol": 1e-4}
            torch.testing.assert_close(one, two, **tolerance, msg=lambda text, n=number: f"update {n}: {text}")
        if number:
            assert not all(one.equal(two) for one, two in zip(mine, found[number - 1], strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
