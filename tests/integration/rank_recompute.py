"""One trainer rank of test_recompute.py: python rank_recompute.py FOLDER..., under torchrun.

In each FOLDER it trains groups.msgpack for two updates with config.json, without recomputation and with each setting of
recompute.json, and asserts that no bit of figures, gradients and weights depends on it. counts.json gets the number of
passes with gradient through a layer's attention, per setting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from asyncrl.backends.cpu import megatron_shim

megatron_shim.enable()

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.config import Config, read  # noqa: E402
from asyncrl.parallel import Parallel  # noqa: E402
from asyncrl.schema import Batch, Group  # noqa: E402
from asyncrl.trainer.attention import PackedAttention  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from tests.integration.rank_routing import with_settings  # noqa: E402

Outcome = tuple[list[dict[str, float]], list[Tensor], int]


def updated(config: Config, folder: Path, groups: list[Group], parallel: Parallel) -> Outcome:
    """Return the figures of two updates; gradients and weights after them; and the passes through attention in which a
    gradient is recorded although no graph is alive outside, which are those in backward."""
    policy, again = Policy(config, folder / "model", parallel), [0]
    for module in (module for chunk in policy.network._inner.values() for module in chunk.modules()):
        if isinstance(module, PackedAttention):
            module.register_forward_hook(lambda *_: again.__setitem__(0, again[0] + in_backward()))
    figures = [policy.update(Batch(version, groups, {})) for version in range(2)]
    parameters = list(policy.network.parameters())
    tensors = [tensor.clone() for one in parameters for tensor in (one.detach(), one.main_grad)]  # type: ignore[attr-defined]
    return figures, tensors, again[0]


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def main(folders: list[Path]) -> None:
    parallel = initialize(read(folders[0]).trainer, gpu=False, seed=0, timeout=120.0)
    for folder in folders:
        config = read(folder)
        groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
        figures, tensors, none = updated(config, folder, groups, parallel)
        assert none == 0
        counts: dict[str, int] = {}
        settings: dict[str, Any] = json.loads((folder / "recompute.json").read_text())
        for name, recompute in settings.items():
            whole = {**config.trainer.recompute.model_dump(), **recompute}
            other = with_settings(config, trainer={"recompute": whole})
            mine, others, counts[name] = updated(other, folder, groups, parallel)
            assert mine == figures, f"{folder.name}, {name}: {mine} and {figures}"
            assert all(one.equal(two) for one, two in zip(tensors, others, strict=True)), f"{folder.name}, {name}"
        if parallel.is_first:
            (folder / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
