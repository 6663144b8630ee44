"""What updates make of a teacher's log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from asyncrl.algo.samples import build_samples
from asyncrl.algo.table import build_table
from asyncrl.config import load
from asyncrl.schema import Batch, Group, Trajectory, Turn
from asyncrl.trainer.policy import Policy
from tests.integration.ranks.joining import groups_of, joined


def by_itself(policy: Policy, groups: list[Group]) -> list[Group]:
    """Return the groups, scored by the policy in place of the teacher."""
    own = iter(policy._score(build_samples(groups), build_table(groups, 0)).tolist())

    def scored(turn: Turn) -> Turn:
        return msgspec.structs.replace(turn, teacher=[next(own) for _ in turn.completion.token_ids])

    def of_group(group: Group) -> Group:
        trajectories = [Trajectory([scored(turn) for turn in one.turns], one.reward) for one in group.trajectories]
        return msgspec.structs.replace(group, trajectories=trajectories)

    return [of_group(group) for group in groups]


def every_case(folder: Path, layout: str) -> dict[str, dict[str, float]]:
    """Train the folder's batch once, from the same weights, with the settings of every config-LAYOUT-CASE.json, and
    return the figures of each case. In the case "same" the teacher's log-probabilities are the policy's own."""
    groups = groups_of(folder)
    parallel, figures = None, {}
    for file in sorted(folder.glob(f"config-{layout}-*.json")):
        config = load(json.loads(file.read_text()))
        parallel = parallel or joined(config.trainer)
        policy = Policy(config, folder / "model", parallel)
        case = file.stem.removeprefix(f"config-{layout}-")
        batch = by_itself(policy, groups) if case == "same" else groups
        figures[case] = policy.update(Batch(0, batch, {}))
    return figures
