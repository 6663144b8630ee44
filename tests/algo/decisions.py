"""A small world of decisions, all of whose episodes can be counted: what an estimator gives in expectation, exactly.

Two actions, three turns at most. STOP ends the episode; GO leads on to an observation, the first of which is drawn by
chance. The policy is a softmax of its own numbers in every context; rewards are arbitrary, and differ everywhere.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable, build_table
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan

PROMPT = (12,)
STOP, GO = 1, 2
SEEN = ({5: 0.25, 6: 0.75}, {5: 1.0})  # after the first GO, and after the second
TURNS = 3

Context = tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """One turn of a way."""

    context: Context
    action: int
    reward: float
    history: Context  # observations and actions before it
    seen: int  # the last observation; 0 before the first


@dataclass(frozen=True)
class Tree:
    """One episode, and its probability."""

    chance: float
    decisions: list[Decision]
    trajectory: Trajectory


@dataclass(frozen=True)
class Groups:
    """All groups of so many episodes, as a table."""

    table: TokenTable
    chances: Tensor  # [groups]
    scores: Tensor  # [N, contexts, 2] grad log pi of each turn's token
    size: int

    def mean(self, advantages: Tensor) -> Tensor:
        """Gradient that they give in expectation, of one episode."""
        chances = self.chances[self.table.group[self.table.owner]]
        return torch.einsum("n,nca->ca", chances * advantages, self.scores) / self.size

    def variance(self, advantages: Tensor) -> float:
        """Return the variance of one group's gradient over one episode, summed over the parameters."""
        single = torch.zeros(len(self.chances), *self.scores.shape[1:], dtype=torch.float64)
        single.index_add_(0, self.table.group[self.table.owner], advantages[:, None, None] * self.scores / self.size)
        return float((self.chances[:, None, None] * single**2).sum() - (self.mean(advantages) ** 2).sum())


class World:
    """`forgets`: its contexts are the last observation alone, so that one may come twice."""

    def __init__(self, *, forgets: bool = False) -> None:
        self._forgets = forgets
        contexts = sorted({one.context for _, way in self._ways((), 0, None) for one in way})
        self._row = {context: row for row, context in enumerate(contexts)}
        generator = torch.Generator().manual_seed(3)
        self._logits = torch.randn(len(contexts), 2, dtype=torch.float64, generator=generator)

    def policy_gradient(self, discount: float = 1.0) -> Tensor:
        """Return the gradient of the expected reward by differentiation. With a discount, it is the sum over turns of
        the expected return times grad log pi."""
        logits = self._logits.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for drawn, way in self._ways((), 0, None):
            rows, actions = [self._row[one.context] for one in way], [one.action - STOP for one in way]
            logprobs = torch.log_softmax(logits, -1)[rows, actions]
            if discount == 1.0:
                total = total + drawn * logprobs.sum().exp() * sum(one.reward for one in way)
                continue
            to_go = [sum(d.reward * discount**n for n, d in enumerate(way[k:])) for k in range(len(way))]
            chance = drawn * float(logprobs.detach().sum().exp())
            total = total + chance * (logprobs * torch.tensor(to_go, dtype=torch.float64)).sum()
        (found,) = torch.autograd.grad(total, logits)
        return found

    def groups(self, size: int, forks: dict[int, int], *, failed: bool = False) -> Groups:
        """All groups of so many episodes, which fork so many times before these turns, if they get there; `failed`: and
        only where that has come to nothing."""
        every = list(itertools.product(self._trees(forks, failed), repeat=size))
        groups = [Group(f"g{n}", n, list(PROMPT), [tree.trajectory for tree in of], "t") for n, of in enumerate(every)]
        decisions = [one for of in every for tree in of for one in tree.decisions]
        rows = torch.tensor([self._row[one.context] for one in decisions])
        actions = torch.tensor([one.action - STOP for one in decisions])
        scores = torch.zeros(len(decisions), *self._logits.shape, dtype=torch.float64)
        scores[torch.arange(len(rows)), rows] = torch.eye(2, dtype=torch.float64)[actions] - self._policy[rows]
        chances = torch.tensor([math.prod(tree.chance for tree in of) for of in every], dtype=torch.float64)
        return Groups(build_table(groups, 0), chances, scores, size)

    # -- its ways --------------------------------------------------------------------------------------------

    @property
    def _policy(self) -> Tensor:
        return torch.softmax(self._logits, -1)

    def _trees(self, forks: dict[int, int], failed: bool) -> list[Tree]:
        found = []
        for chance, trunk in self._ways((), 0, self._policy):
            may = not failed or sum(one.reward for one in trunk) <= 0
            at = [turn for turn, count in forks.items() if may and turn < len(trunk) for _ in range(count)]
            ways = [list(self._ways(trunk[turn].history, trunk[turn].seen, self._policy)) for turn in at]
            for branches in itertools.product(*ways):
                placed = list(zip(at, (way for _, way in branches), strict=True))
                together = chance * math.prod(more for more, _ in branches)
                decisions = [*trunk, *(one for _, way in placed for one in way)]
                found.append(Tree(together, decisions, self._trajectory(trunk, placed)))
        return found

    def _ways(self, history: Context, seen: int, policy: Tensor | None) -> Iterator[tuple[float, list[Decision]]]:
        """All ways on from here, with their probabilities (of what the world draws alone, without a policy)."""
        told = (*history, seen) if history else ()
        context = (seen,) if self._forgets and seen else (*PROMPT, *told)
        for action in (STOP, GO):
            chance = 1.0 if policy is None else float(policy[self._row[context], action - STOP])
            reward = random.Random(str((told, action))).choice(range(-8, 9)) / 4
            one, after = Decision(context, action, reward, history, seen), (*told, action)
            turn = len(after) // 2
            if action == STOP or turn == TURNS - 1:
                yield chance, [one]
                continue
            for next_seen, likely in SEEN[turn].items():
                for more, way in self._ways(after, next_seen, policy):
                    yield chance * likely * more, [one, *way]

    def _trajectory(self, trunk: Sequence[Decision], branches: Sequence[tuple[int, Sequence[Decision]]]) -> Trajectory:
        turns = [self._turn(one) for one in trunk]
        for fork, way in branches:
            turns += [self._turn(way[0], fork - 1), *(self._turn(one) for one in way[1:])]
        return Trajectory(turns, 0.0)

    def _turn(self, one: Decision, fork: int | None = None) -> Turn:
        begins = fork is not None or (self._forgets and one.seen > 0)
        observation = list(one.context) if begins else [one.seen] if one.seen else []
        written = Completion([one.action], [-1.0], [VersionSpan(0, 0, 1)], "stop")
        return Turn(observation, written, one.reward, begins=begins, fork=fork)


@cache
def world(*, forgets: bool = False) -> World:
    """Made once."""
    return World(forgets=forgets)


@cache
def groups(
    size: int, forks: tuple[tuple[int, int], ...] = (), *, forgets: bool = False, failed: bool = False
) -> Groups:
    """Likewise."""
    return world(forgets=forgets).groups(size, dict(forks), failed=failed)
