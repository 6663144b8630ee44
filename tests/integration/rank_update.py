"""One trainer rank of a layout test: python rank_update.py FOLDER, under torchrun.

Loads FOLDER/model, trains FOLDER/groups.msgpack for two updates with the settings in FOLDER/config.json, and writes
figures and weights for the test to compare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.trainer import cpu

cpu.enable()

import msgspec  # noqa: E402

from asyncrl.config import read  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402
from asyncrl.types import Group  # noqa: E402
from asyncrl.weights.export import save_hf  # noqa: E402


def main(folder: Path) -> None:
    config = read(folder)
    parallel = initialize(config.trainer, gpu=False, seed=0, timeout=120.0)
    policy = Policy(config, folder / "model", parallel)
    groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
    figures = [policy.update(groups) for _ in range(2)]
    save_hf(folder / f"out-{sys.argv[2]}", folder / "model", policy.hf_tensors(), parallel, config.trainer.dtype)
    if parallel.is_first:
        (folder / f"figures-{sys.argv[2]}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
