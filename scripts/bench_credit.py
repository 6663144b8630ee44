"""Benchmark of the noise of policy-gradient estimators, with and without forks, at the same number of generated turns.

    python scripts/bench_credit.py [--quick] [--groups N] [--turns 8] [--seed 0]

A toy agent acts right or wrong in each turn. A wrong turn loses the task for good with some probability. The reward is
1 at the end of a task that was not lost (`end`); the same plus or minus the luck of the environment, which the agent
learns after its first turn (`luck`); or a part of the reward with every right turn (`turns`). Every turn also says one
of thousands of words, so that episodes share a context only where they fork. The policy has one parameter for each turn
and state, so its exact gradient is known.

`noise` is the variance of one group's gradient, summed over the parameters, divided by the squared gradient. The number
in parentheses is the distance of the mean over all groups from the gradient, divided by the gradient: if it does not
fall with the number of groups, the estimator is biased or has another scale. The last line is JSON: noise by case and
estimator.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.algo.advantage import ADVANTAGES  # noqa: E402
from asyncrl.algo.table import build_table  # noqa: E402
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan  # noqa: E402
from asyncrl.settings import Choice  # noqa: E402
from scripts import machine  # noqa: E402

RIGHT, WRONG, WORDS = 1, 2, 5000
P_RIGHT, P_LOST, LUCK = 0.8, 0.4, 1.0
REWARDS = ("end", "luck", "turns")
ESTIMATORS = {
    "rloo": "rloo",
    "turn_discounted": "turn_discounted",
    "turn_loo": "turn_loo",
    "dr_gigpo": "asyncrl_recipes.gigpo.advantage:dr_gigpo",
}


@dataclass(frozen=True)
class Case:
    """Shape of the groups of one case."""

    episodes: int
    forks: dict[int, int]  # number of additional branches, by the turn before which they begin

    def written(self, turns: int) -> int:
        """Return the number of generated turns in a group."""
        return self.episodes * (turns + sum(ways * (turns - at) for at, ways in self.forks.items()))

    def __str__(self) -> str:
        ways = ", ".join(f"{ways} more from turn {at}" for at, ways in self.forks.items())
        return f"{self.episodes} episodes" + (f", each with {ways}" if ways else "")


class Toy:
    """The toy environment and its policy."""

    def __init__(self, turns: int, rewards: str, seed: int) -> None:
        self.turns, self.rewards, self._random = turns, rewards, random.Random(seed)

    def gradient(self) -> Tensor:
        """Return the gradient of the expected reward by the logits of acting right, [turns, lost or not]."""
        found = torch.zeros(self.turns, 2, dtype=torch.float64)
        keeps, slope = P_RIGHT + (1 - P_RIGHT) * (1 - P_LOST), P_RIGHT * (1 - P_RIGHT)
        for turn in range(self.turns):
            left = self.turns - turn - 1
            gain = P_LOST * keeps**left
            if self.rewards == "turns":  # right turns of a task that is not lost are rewarded
                gain = (1 + P_LOST * P_RIGHT * sum(keeps**n for n in range(left))) / self.turns
            found[turn, 0] = keeps**turn * slope * gain
        return found

    def way(self, turn: int, lost: bool, luck: float) -> tuple[list[tuple[bool, int, float]], list[bool]]:
        """Play from this turn on.

        Return (right, word, reward) of each turn, and whether the task is lost after each.
        """
        found, states = [], []
        for at in range(turn, self.turns):
            right = self._random.random() < P_RIGHT
            reward = float(right and not lost) / self.turns if self.rewards == "turns" else 0.0
            lost = lost or (not right and self._random.random() < P_LOST)
            if at == self.turns - 1 and self.rewards != "turns":
                reward = float(not lost) + luck
            found.append((right, self._random.randrange(3, WORDS), reward))
            states.append(lost)
        return found, states

    def trajectory(self, forks: dict[int, int]) -> tuple[Trajectory, list[tuple[int, bool, bool]]]:
        """Return one episode, and (turn, lost before it, right) of each of its turns."""
        luck = self._random.choice([-LUCK, LUCK]) if self.rewards == "luck" else 0.0
        trunk, after = self.way(0, False, luck)
        before = [False, *after]
        ways = [(0, trunk, before)]
        for at, count in forks.items():
            for _ in range(count):
                way, after = self.way(at, before[at], luck)
                ways.append((at, way, [before[at], *after]))
        turns, told = [], []
        for number, (at, way, lost) in enumerate(ways):
            for n, (right, word, reward) in enumerate(way):
                branches = number > 0 and n == 0
                context = [0, *(token for r, w, _ in trunk[:at] for token in (w, RIGHT if r else WRONG))]
                written = Completion([word, RIGHT if right else WRONG], [-1.0] * 2, [VersionSpan(0, 0, 2)], "stop")
                fork = at - 1 if branches else None
                turns.append(Turn(context if branches else [], written, reward, begins=branches, fork=fork))
                told.append((at + n, lost[n], right))
        return Trajectory(turns, 0.0), told


Estimators = Mapping[str, Callable[..., Tensor]]


def noise(toy: Toy, case: Case, groups: int, estimators: Estimators) -> dict[str, tuple[float, float]]:
    """Return (variance of one group's gradient, distance of the mean) relative to the gradient, by estimator."""
    played = [[toy.trajectory(case.forks) for _ in range(case.episodes)] for _ in range(groups)]
    made = [Group(f"g{n}", n, [0], [one for one, _ in of], "toy") for n, of in enumerate(played)]
    table = build_table(made, 0)
    told = [one for of in played for _, turns in of for one in turns]
    turn, lost, right = (torch.tensor(column) for column in zip(*told, strict=True))
    score = right.double() - P_RIGHT
    group, exact = table.group[table.owner][1::2], toy.gradient()
    found = {}
    for name, estimate in estimators.items():
        advantages = estimate(table)[1::2]  # only the second token of a turn acts
        single = torch.zeros(groups, *exact.shape, dtype=torch.float64)
        single.index_put_((group, turn, lost.long()), advantages * score / case.episodes, accumulate=True)
        mean = single.mean(0)
        size = float((exact**2).sum())
        variance = float(((single - mean) ** 2).sum() / (groups - 1))
        found[name] = (variance / size, math.sqrt(float(((mean - exact) ** 2).sum()) / size))
    return found


def main() -> None:
    """Measure every case, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the groups")
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    groups = options.groups // 10 if options.quick else options.groups
    this = machine.report()
    half = options.turns // 2
    cases = [Case(8, {}), Case(4, {half: 2}), Case(4, {half // 2: 1, half + half // 2: 1}), Case(2, {half: 6})]
    estimators = {name: ADVANTAGES.find(Choice(name=path)) for name, path in ESTIMATORS.items()}
    console, result = Console(width=140), {}
    for rewards in REWARDS:
        toy = Toy(options.turns, rewards, options.seed)
        shown = Table("case", "turns", *ESTIMATORS, title=f"rewards={rewards}: noise (off)")
        for case in cases:
            found = noise(toy, case, groups, estimators)
            shown.add_row(
                str(case), str(case.written(options.turns)), *(f"{a:.2f} ({b:.2f})" for a, b in found.values())
            )
            result[f"{rewards}: {case}"] = {name: round(a, 3) for name, (a, _) in found.items()}
        console.print(shown)
    print(json.dumps({**result, "machine": this}))


if __name__ == "__main__":
    main()
