"""One trainer rank of the distillation test: python rank_distill.py NAME FOLDER, under torchrun.

Trains groups.msgpack of FOLDER once, from the same weights, with the settings of every config-CASE.json, and writes the
figures of all. In the case "same" the teacher's log-probabilities are replaced by the policy's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl.platforms import here

here().prepare_trainer()

import msgspec  # noqa: E402

from asyncrl.algo.samples import build_samples  # noqa: E402
from asyncrl.algo.table import build_table  # noqa: E402
from asyncrl.config import load  # noqa: E402
from asyncrl.schema import Batch, Group, Trajectory, Turn  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.trainer.policy import Policy  # noqa: E402


def by_itself(policy: Policy, groups: list[Group]) -> list[Group]:
    """Return the groups, scored by the policy in place of the teacher."""
    own = iter(policy._score(build_samples(groups), build_table(groups, 0)).tolist())

    def scored(turn: Turn) -> Turn:
        return msgspec.structs.replace(turn, teacher=[next(own) for _ in turn.completion.token_ids])

    def of_group(group: Group) -> Group:
        trajectories = [Trajectory([scored(turn) for turn in one.turns], one.reward) for one in group.trajectories]
        return msgspec.structs.replace(group, trajectories=trajectories)

    return [of_group(group) for group in groups]


def main(name: str, folder: Path) -> None:
    groups = msgspec.msgpack.decode((folder / "groups.msgpack").read_bytes(), type=list[Group])
    parallel, figures = None, {}
    for file in sorted(folder.glob(f"config-{name}-*.json")):
        config = load(json.loads(file.read_text()))
        parallel = parallel or initialize(config.trainer, gpu=False, seed=0, timeout=120.0)
        policy = Policy(config, folder / "model", parallel)
        case = file.stem.removeprefix(f"config-{name}-")
        batch = by_itself(policy, groups) if case == "same" else groups
        figures[case] = policy.update(Batch(0, batch, {}))
    assert parallel is not None
    if parallel.is_first:
        (folder / f"figures-{name}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
