"""What ranks with TransformerEngine's Python modules compute (tests/integration/ranks)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import transformer_engine.pytorch as te
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from asyncrl.algo.pack import pack
from asyncrl.config import Config, TrainerConfig, read
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer import model as megatron
from asyncrl.trainer import sharded
from asyncrl.trainer.network import forward
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.policy_state import PolicyState
from asyncrl.weights.mapping import local_name
from tests.fakes import changed
from tests.integration.families import groups as families_batch
from tests.integration.ranks import offload
from tests.integration.ranks.joining import groups_of, joined, with_settings
from tests.te_stub.stand_in import CALLS

# --- layers ---------------------------------------------------------------------------------------------------------


def layers(folder: Path) -> dict[str, dict[str, int]]:
    """Build every model of FOLDER with both kinds of layers. Asserts that their parameters are the same, and which
    products add gradients to the buffers. Returns the functions of TransformerEngine's extension that one pass forward
    and backward has called, with their calls."""
    settings = json.loads((folder / "single.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    joined(trainer)
    calls = {}
    for name in settings["models"]:
        hf = megatron.read_hf_config(folder / name)
        built = {}
        for layers in ("local", "transformer_engine"):
            one = trainer.model_copy(update={"layers": layers})
            built[layers] = megatron.build_model(hf, megatron.transformer_config(hf, one))
        local, te = ({n: p.shape for n, p in model.named_parameters()} for model in built.values())
        assert {local_name(n): shape for n, shape in te.items()} == local, name
        CALLS.clear()
        model = built["transformer_engine"]
        for parameter in model.parameters():
            parameter.main_grad = parameter.data.new_zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
        forward(model, model, pack(families_batch())).sum().backward()
        fused = {n for n, p in model.named_parameters() if p.grad_added_to_main_grad}
        assert fused == {n for n in te if re.search(r"\.linear_\w+\.weight\d*$", n)}, name
        calls[name] = dict(CALLS)
    return calls


# --- storages that move ---------------------------------------------------------------------------------------------


def copies(trained: Any) -> dict[int, int]:
    """Return the bytes of storages of FP8 copies, by identity."""
    kept = [
        copy
        for chunk in trained.network.wrapped
        for module in chunk.modules()
        for copy in getattr(module, "_fp8_workspaces", {}).values()
    ]
    assert bool(kept) == (trained.network.config.fp8 is not None and trained.updated)
    storages = [part.untyped_storage() for copy in kept for part in (copy._data, copy._transpose) if part is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}


class Counting(offload.Trained):
    """A network whose FP8 copies are counted, whether DeviceMemory knows of them or not."""

    updated = False

    def update(self) -> None:
        super().update()
        self.updated = True

    def bytes_on_device(self) -> int:
        known = {one.untyped_storage()._cdata for part in self._held() for one in part}
        return super().bytes_on_device() + sum(size for key, size in copies(self).items() if key not in known)


def moved(trainer: TrainerConfig, model: Path) -> dict[str, Any]:
    """Do the same as tests/integration/ranks/offload.py, counting also the FP8 copies of weights on the device."""
    return offload.moved(trainer, model, Counting)


# --- the optimizer --------------------------------------------------------------------------------------------------


def weights(policy: Policy) -> list[Tensor]:
    return [parameter.detach().float().clone() for parameter in policy.network.parameters()]


def moments(policy: Policy) -> dict[tuple[str, Any], Tensor]:
    """Return this rank's moments by key and place: optimizers of another kind hold them in another order."""
    pieces = PolicyState(policy).sharded()["policy"].states()
    return {(one.key, one.box.offset): one.tensor.clone() for one in pieces if one.key.startswith("optimizer.")}


def trained(config: Config, folder: Path, groups: list[Group], parallel: Parallel) -> list[list[Tensor]]:
    """Return the weights after each of the three updates."""
    policy, found = Policy(config, folder / "model", parallel), []
    policy.update(Batch(0, groups, {}))
    found.append(weights(policy))
    saved = folder / f"checkpoint-{config.trainer.optimizer.moments_dtype}"
    saved.mkdir(exist_ok=True)
    sharded.write(saved, list(PolicyState(policy).sharded()["policy"].written()), None)
    kept, counters = moments(policy), PolicyState(policy).counters()
    policy.update(Batch(1, groups, {}))
    found.append(weights(policy))
    policy.optimizer.start_anew()
    policy.update(Batch(2, groups, {}))
    found.append(weights(policy))

    again = Policy(config, folder / "model", parallel)
    PolicyState(again).sharded()["policy"].load(saved)
    PolicyState(again).restore(counters, {})
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
            PolicyState(policy).sharded()["policy"].load(saved)
        mine, other = map(moments, policies)
        assert mine.keys() == other.keys()
        assert all(one.dtype == getattr(torch, read_as) for one in other.values())
        assert all(one.to(other[place].dtype).equal(other[place]) for place, one in mine.items())
        assert any(one.any() for one in mine.values())


def moments_in(config: Config, dtype: str) -> Config:
    """Return the configuration with another number format of the moments."""
    return with_settings(config, trainer=changed(config.trainer.model_dump(), {"optimizer.moments_dtype": dtype}))


def adam(folder: Path) -> None:
    """Train FOLDER with torch's AdamW and with TransformerEngine's FusedAdam, which Megatron takes on GPUs: an update,
    another one, one after the moments were reset, and the second one again from a checkpoint. Asserts that the weights
    agree. With moments in bfloat16, torch's AdamW keeps them in float32, and checkpoints are read with either format.
    """
    config = read(folder)
    parallel, groups = joined(config.trainer), groups_of(folder)
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
