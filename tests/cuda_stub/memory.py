"""The bytes that a fake rank holds, beside those that the planner says."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.extensions.plan import memory as planner
from asyncrl.extensions.plan.settings import layout_of, training_of
from asyncrl.extensions.plan.shapes import counted, shape_of
from asyncrl.launch.checks.model_files import read_model
from tests.cuda_stub.fake import MODE

STATE = ("weights", "frozen base", "gradients", "masters", "moments", "frozen weights", "gather buffer")


def held(policy: Any, config: Config, folder: Path, stage: int, tokens: int) -> dict[str, Any]:
    """Return what this rank holds after an update and its peak in it, and what the planner says of its stage for
    micro-batches of this many tokens."""
    gc.collect()
    ledger = MODE.ledger
    planned = _planned(config, folder, stage, tokens)
    return {"found": _state(policy), "live": ledger.live, "peak": ledger.peak, "planned": planned}


def _state(policy: Any) -> dict[str, int]:
    from megatron.core import parallel_state

    networks = policy.networks()
    optimizers = [policy.optimizer, *(optimizer for _, optimizer in policy.others.values())]
    every = {id(one): one for network in networks for one in (*network.parameters(), *network.packed())}.values()
    parameters = [one for one in every if one.requires_grad]
    shards = [one for optimizer in optimizers for one in optimizer.shards()]
    reference = policy._reference.states() if policy._reference else []
    gathered = parallel_state.get_global_memory_buffer().buffer
    frozen = [one for one in reference if one.device.type == "cuda"]
    return {
        "weights": sum(one.nbytes for one in parameters),
        "frozen base": sum(one.nbytes for one in every if not one.requires_grad),
        "gradients": sum(one.main_grad.nbytes for one in parameters),
        "masters": sum(one.master.nbytes for one in shards if one.master.dtype != one.parameter.dtype),
        "moments": sum(moment.nbytes for one in shards for moment in one.moments.values()),
        "frozen weights": sum(one.nbytes for one in frozen),
        "gather buffer": sum(one.nbytes for one in gathered.values()),
    }


def _planned(config: Config, folder: Path, stage: int, tokens: int) -> dict[str, int]:
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    weights = counted(read_model(folder, "model.path").weights.items(), shape)
    training = replace(training_of(config, gpu=True), tokens=tokens, publishes=False)
    return planner._stage(weights, shape, layout_of(config.trainer), training, stage)
