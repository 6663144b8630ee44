"""One trainer rank of a test of settings that change no bit of an update: python rank_variants.py FOLDER..., under
torchrun.

In each FOLDER it trains groups.msgpack for two updates with config.json, and again with each change of the trainer's
settings in variants.json, and asserts that no bit of figures and weights depends on it. counts.json gets for each what
ran inside backward: passes through attention, which are recomputed ones, and reductions of gradients; and what was in
host memory during passes: tensors of the optimizer, and activations.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from asyncrl.platforms import here

here().prepare_trainer()

import msgspec  # noqa: E402
import torch  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.config import Config, load, read  # noqa: E402
from asyncrl.extensions.offload.device_memory import MovedStates  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.schema import Batch, Group  # noqa: E402
from asyncrl.trainer.attention import PackedAttention  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from tests.fakes import changed, in_parts  # noqa: E402
from tests.integration.variants import of_run  # noqa: E402

COUNTS = {"attention": 0, "reductions": 0, "away": 0, "activations": 0, "layers": 0}


def counted(kind: str, owner: Any, name: str) -> None:
    """Count the calls of a method while autograd runs a backward pass in this thread."""
    own = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        COUNTS[kind] += torch._C._current_graph_task_id() != -1
        return own(*args, **kwargs)

    setattr(owner, name, method)


def counted_away(policy: Policy) -> None:
    """Count the tensors of the optimizer that have no memory while passes with gradient run."""
    own = policy.network.train

    def train(*args: Any, **kwargs: Any) -> None:
        COUNTS["away"] += sum(not tensor.untyped_storage().nbytes() for tensor in policy.optimizer.states())
        own(*args, **kwargs)

    policy.network.train = train  # type: ignore[method-assign]


def counted_activations(offload: Any) -> None:
    """Count the bytes of activations that come back to the device in backward, and the layers of a micro-batch that are
    on the device and in host memory when forward is about to copy the next one."""
    load, send = offload._load, offload._send

    def loaded(layer: Any) -> None:
        COUNTS["activations"] += sum(layer.host[n].nbytes for n, one in enumerate(layer.device) if one is None)
        load(layer)

    def sent(layer: Any) -> None:
        send(layer)
        earlier, held = layer.before, 0
        while earlier:
            held += any(one is not None and earlier.host[n] is not None for n, one in enumerate(earlier.device))
            earlier = earlier.before
        COUNTS["layers"] = max(held, COUNTS["layers"])

    offload._load, offload._send = loaded, sent


def updated(
    config: Config, folder: Path, groups: list[Group], parallel: Parallel
) -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
    """Return the figures of two updates, and weights and gradients after them."""
    policy = Policy(config, folder / "model", parallel)
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    for offload in getattr(policy._hooks.get("offload"), "offloads", []):
        offload.stand_in, offload.least = True, 0
        counted_activations(offload)
    if isinstance(policy.optimizer.memory, MovedStates):
        policy.optimizer.memory.memory._stand_in = True
        counted_away(policy)
    batches = [in_parts(Batch(version, groups, {}), config.trainer.batch_parts) for version in range(2)]
    figures = [[policy.update(part) for part in batch][-1] for batch in batches]
    parameters = list(policy.network.parameters())
    gradients = [one.main_grad.clone() for one in parameters if one.requires_grad]  # type: ignore[attr-defined]
    return figures, [one.detach().clone() for one in parameters], gradients


def main(folders: list[Path]) -> None:
    parallel = initialize(read(folders[0]).trainer, gpu=False, seed=0, timeout=120.0)
    counted("attention", PackedAttention, "forward")
    counted("reductions", _ParamAndGradBucketGroup, "start_grad_sync")
    for folder in folders:
        config = read(folder)
        groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
        figures, weights, gradients = updated(config, folder, groups, parallel)
        assert not any(COUNTS.values())
        counts: dict[str, dict[str, int]] = {}
        for name, changes in json.loads((folder / "variants.json").read_text()).items():
            other = load(changed(config.model_dump(), of_run(changes)))
            mine, my_weights, my_gradients = updated(other, folder, groups, parallel)
            counts[name] = dict(COUNTS)
            differ = [key for one, two in zip(figures, mine, strict=True) for key in one if one[key] != two[key]]
            if other.trainer.overlap_grad_reduce:  # the norm is a sum over shards, and those depend on buckets
                for one, two in zip(figures, mine, strict=True):
                    assert math.isclose(one["grad_norm"], two["grad_norm"], rel_tol=1e-6)
                differ = [key for key in differ if key != "grad_norm"]
            assert not differ, f"{folder.name}, {name}: {differ} of {mine} and {figures}"
            assert all(one.equal(two) for one, two in zip(weights, my_weights, strict=True)), f"{folder.name}, {name}"
            if not other.trainer.overlap_grad_reduce:  # which shards hold a reduced gradient depends on buckets
                assert all(one.equal(two) for one, two in zip(gradients, my_gradients, strict=True)), name
        if parallel.is_first:
            (folder / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
