"""What checkpoints hold, and what training makes of them."""

from __future__ import annotations

import resource
from pathlib import Path

from msgspec.structs import replace

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import Config, read
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer import checkpoint
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.policy_state import PolicyState
from tests.fakes import fake_rank
from tests.integration.checkpoints import VERSION
from tests.integration.ranks.joining import groups_of, joined


def with_solver(group: Group) -> Group:
    """Return the group with a turn of another role in each trajectory."""
    episodes = [
        replace(one, turns=[*one.turns, replace(one.turns[0], observation=[9, 1], role="solver")])
        for one in group.trajectories
    ]
    return replace(group, trajectories=episodes)


def checkpoints_of(
    config: Config, folder: Path, parallel: Parallel, policy: Policy, told: list[str]
) -> checkpoint.Checkpoints:
    """Return what writes checkpoints to a folder; `told` gets what it says to the rollout process."""
    rank = fake_rank(config, folder, parallel, told)
    return checkpoint.Checkpoints(rank, PolicyState(policy), counters=dict, snapshot=lambda version: b"rollout")


def continued(name: str, source: str | None, folder: Path) -> list[dict[str, float]]:
    """Train the folder's batch for two updates, or load the checkpoint SOURCE in their place; write a checkpoint NAME,
    train once more, write the weights to out-NAME and return the figures. Layouts continue from each other's
    checkpoints as if nothing had happened."""
    config = read(folder)
    parallel = joined(config.trainer)
    policy, groups = Policy(config, folder / "model", parallel), groups_of(folder)
    if config.agents.roles:
        groups = [with_solver(group) for group in groups]
    told: list[str] = []
    writer = checkpoints_of(config, folder / name, parallel, policy, told)
    if source is None:
        for version in range(VERSION):
            policy.update(Batch(version, groups, {}))
    else:
        writer.load(CheckpointStore(folder / source).path(VERSION))
    writer.save(VERSION)
    figures = policy.update(Batch(VERSION, groups, {}))
    writer.finish()
    assert (writer.last, told) == (VERSION, []), told
    target, dtype = folder / f"out-{name}", config.trainer.dtype
    policy.network.transformation.save(target, folder / "model", policy.weights, parallel, dtype)
    return [figures]


def full_disk(folder: Path) -> None:
    """Assert that a disk that accepts a checkpoint, then nothing from rank 1, then has too little space, and then
    accepts a checkpoint again costs all ranks two checkpoints and nothing else."""
    config = read(folder)
    parallel = joined(config.trainer)
    policy, store = Policy(config, folder / "model", parallel), CheckpointStore(folder / "full")
    told: list[str] = []
    checkpoints = checkpoints_of(config, folder / "full", parallel, policy, told)

    def save(version: int) -> tuple[int, int]:
        checkpoints.save(version)
        checkpoints.finish()
        return checkpoints.last, checkpoints.failed

    assert save(1) == (1, 0)
    none, whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    if parallel.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, whole))
    assert save(2) == (1, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (none, whole))
    checkpoints._size = 1 << 60
    assert save(3) == (1, 2)
    checkpoints._size = 0
    if parallel.is_first:
        assert len(told) == 2, told
        assert "checkpoint 2 could not be written; the run continues without it: rank 1:" in told[0], told
        assert "GB left" in told[1], told
        assert [path.name for path in store.folder.iterdir()] == ["00000001"]
        assert store.newest(told.append) is not None
    assert save(4) == (4, 2)
