"""One trainer rank of test_checkpoint.py: python rank_checkpoint.py NAME SOURCE FOLDER..., under torchrun.

In each FOLDER it loads model/ and trains groups.msgpack for two updates, or takes the checkpoint of SOURCE in their
place; writes a checkpoint of NAME, trains once more, and writes figures and weights under NAME.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import msgspec  # noqa: E402
import torch  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from asyncrl.checkpoints.store import CheckpointStore  # noqa: E402
from asyncrl.config import read  # noqa: E402
from asyncrl.schema import Batch, Group  # noqa: E402
from asyncrl.trainer import checkpoint  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from tests.fakes import fake_rank  # noqa: E402

VERSION = 2


def with_solver(group: Group) -> Group:
    """Return the group with a turn of another role in each trajectory."""
    episodes = [
        replace(one, turns=[*one.turns, replace(one.turns[0], observation=[9, 1], role="solver")])
        for one in group.trajectories
    ]
    return replace(group, trajectories=episodes)


def main(name: str, source: str, folders: list[Path]) -> None:
    parallel = initialize(read(folders[0]).trainer, gpu=torch.cuda.is_available(), seed=0, timeout=120.0)
    for folder in folders:
        config = read(folder)
        policy = Policy(config, folder / "model", parallel)
        groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
        if config.agents.roles:
            groups = [with_solver(group) for group in groups]
        if source == "-":
            for version in range(VERSION):
                policy.update(Batch(version, groups, {}))
        else:
            checkpoint.load(CheckpointStore(folder / source).path(VERSION), policy)
        told: list[str] = []
        writer = checkpoint.Checkpoints(
            fake_rank(config, folder / name, parallel, told),
            policy,
            counters=dict,
            snapshot=lambda version: b"",
        )
        writer.save(VERSION)
        figures = policy.update(Batch(VERSION, groups, {}))
        writer.finish()
        assert (writer.last, told) == (VERSION, []), told
        target, dtype = folder / f"out-{name}", config.trainer.dtype
        policy.network.transformation.save(target, folder / "model", policy.weights, parallel, dtype)
        if parallel.is_first:
            (folder / f"figures-{name}.json").write_text(json.dumps([figures]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
