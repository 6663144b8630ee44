"""One trainer rank of a layout test: python rank_update.py NAME FOLDER..., under torchrun.

In each FOLDER it loads model/, trains groups.msgpack for two updates with the settings of config.json, and writes
figures and weights under NAME for the test to compare. One launch serves several models of one layout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import msgspec  # noqa: E402
import torch  # noqa: E402

from asyncrl.config import read  # noqa: E402
from asyncrl.schema import Batch, Group  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from asyncrl.weights.export import save_hf  # noqa: E402
from tests.fakes import in_parts  # noqa: E402


def main(name: str, folders: list[Path]) -> None:
    parallel = initialize(read(folders[0]).trainer, gpu=torch.cuda.is_available(), seed=0, timeout=120.0)
    for folder in folders:
        config = read(folder)
        policy = Policy(config, folder / "model", parallel)
        for offload in getattr(policy._hooks.get("offload"), "offloads", []):
            offload.least = 0  # the model is small
        groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
        batches = [in_parts(Batch(version, groups, {}), config.trainer.batch_parts) for version in range(2)]
        figures = [[policy.update(part) for part in batch][-1] for batch in batches]
        save_hf(folder / f"out-{name}", folder / "model", policy.weights, parallel, config.trainer.dtype)
        if parallel.is_first:
            (folder / f"figures-{name}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], [Path(folder) for folder in sys.argv[2:]])
