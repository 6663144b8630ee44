"""One of two trainer ranks of test_checkpoint.py: python rank_full_disk.py FOLDER, under torchrun.

The disk accepts a checkpoint, then nothing from rank 1, then has too little space, then accepts a checkpoint again.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.checkpoints.store import CheckpointStore  # noqa: E402
from asyncrl.config import read  # noqa: E402
from asyncrl.trainer.checkpoint import Checkpoints  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from tests.fakes import fake_rank  # noqa: E402


def main(folder: Path) -> None:
    config = read(folder)
    parallel = initialize(config.trainer, gpu=False, seed=0, timeout=60.0)
    policy, store = Policy(config, folder / "model", parallel), CheckpointStore(folder / "full")
    told: list[str] = []
    checkpoints = Checkpoints(
        fake_rank(config, folder / "full", parallel, told),
        policy,
        counters=dict,
        snapshot=lambda version: b"rollout",
    )

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
