"""Tables of tokens, made by hand or drawn, and the same tables in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.advantage import ADVANTAGES, WHITEN_EPSILON, AdvantageTraits
from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES, LossTraits
from asyncrl.algo.masks import MASKS, masked
from asyncrl.algo.registry import Algorithm
from asyncrl.algo.table import WHOLE, LossRows, TokenTable, build_table
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from asyncrl.settings import Choice
from tests.examples import examples

P = [12, 1, 11]
few = settings(max_examples=examples(12))  # a table is large; the tests over them are many
quarters = st.integers(-20, 20).map(lambda n: n / 4)


def numbers(values: Sequence[float]) -> Tensor:
    """Return values as a column of the table."""
    return torch.tensor(list(values), dtype=torch.float64)


def logs(*probabilities: float) -> Tensor:
    """Their logarithms."""
    return numbers(probabilities).log()


def loss(name: str, **settings: Any) -> Algorithm[LossTraits]:
    """The loss with those of these settings that it has."""
    own = settings.keys() & LOSSES.completed(Choice(name=name)).settings.keys()
    return LOSSES.find(Choice(name=name, **{one: settings[one] for one in own}))


def advantage(name: str, **settings: Any) -> Algorithm[AdvantageTraits]:
    """The estimator with those of these settings that it has."""
    own = settings if ":" in name else settings.keys() & ADVANTAGES.completed(Choice(name=name)).settings.keys()
    return ADVANTAGES.find(Choice(name=name, **{one: settings[one] for one in own}))


def correction(logprobs: Tensor, rows: LossRows, name: str | None = None, **settings: Any) -> Tensor:
    """The factor of each token's loss: a weight with its settings, and masks by their names."""
    masks = {mask: settings.pop(mask, None) for mask in MASKS}
    weight = CORRECTIONS.find(Choice(name=name, **settings))(rows) if name else torch.ones_like(rows.behaviour)
    return masked(weight, logprobs, rows, masks)


def make(
    lengths: Sequence[int], rewards: Sequence[float], group: Sequence[int] | None = None, **columns: Any
) -> LossRows:
    """Samples of these lengths, one group unless told otherwise; `columns` replace what is filled in plainly. First
    turns of a group are in one context, all others each in one of its own."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths), dtype=torch.int64))
    count = len(sample)
    plain = LossRows(
        sample,
        torch.zeros(count, dtype=torch.int64),
        torch.full((count,), -1.0, dtype=torch.float64),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(len(lengths)),
        torch.tensor(list(group) if group is not None else [0] * len(lengths), dtype=torch.int64),
        numbers(rewards),
        torch.zeros(len(lengths), dtype=torch.bool),
        torch.zeros(count, dtype=torch.float64),
        torch.full((count,), -1),
        torch.ones(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        proximal=torch.full((count,), -1.0, dtype=torch.float64),
        advantages=torch.zeros(count, dtype=torch.float64),
        keep=torch.ones(count, dtype=torch.bool),
        weights=torch.zeros(count, dtype=torch.float64),
    )
    whole = dict.fromkeys(("lag", "turn", "parent", "context", "state"), torch.int64)
    kinds = {**whole, "truncated": torch.bool, "keep": torch.bool}
    made = {name: torch.tensor(values, dtype=kinds.get(name, torch.float64)) for name, values in columns.items()}
    return replace(chained(replace(plain, **made)), **made)


def chained(table: LossRows, kinds: int = 0) -> LossRows:
    """Return the table with every turn linked to the turn before it in its sample. Later turns have contexts and states
    of their own or, with `kinds`, one of so many that turns of one number, or all turns of a group, may share."""
    turn, owner = table.turn.tolist(), table.owner.tolist()
    parent, context, state = list[int](), list[int](), list[int]()
    for row, (number, episode) in enumerate(zip(turn, owner, strict=True)):
        goes_on = row > 0 and owner[row - 1] == episode
        if goes_on and turn[row - 1] == number:
            parent.append(parent[-1])
            context.append(context[-1])
            state.append(state[-1])
            continue
        parent.append(turn[row - 1] if goes_on else -1)
        group, kind = int(table.group[episode]), (7 * episode + 3 * number) % max(1, kinds)
        own = kind if kinds else episode if goes_on else 0
        context.append(10_000 * group + 100 * number + own)
        state.append(100 * group + kind if kinds else context[-1])
    columns = {"parent": parent, "context": context, "state": state}
    return replace(table, **{name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()})


def last_rows(table: TokenTable) -> Tensor:
    """Rows of the last token of each episode that wrote any."""
    lengths = torch.bincount(table.owner, minlength=table.num_episodes)
    return (lengths.cumsum(0) - 1)[lengths > 0]


@st.composite
def tables(draw: st.DrawFn, min_length: int = 0, turns: int = 1, rewards: st.SearchStrategy = quarters) -> LossRows:
    """Up to four groups of up to five samples of up to six tokens; the numbers of tokens are random."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = [draw(st.integers(min_length, 6)) for _ in group]
    made = make(lengths, [draw(rewards) for _ in group], group)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    count = made.num_tokens

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, dtype=torch.float64, generator=generator)

    turn = torch.randint(0, turns, (count,), generator=generator)
    behaviour = -1.0 - noise(0.5).abs()
    placed = replace(made, turn=torch.cat([turn[made.sample == i].sort().values for i in range(len(group))]))
    return replace(
        chained(placed, kinds=2),
        behaviour=behaviour,
        proximal=behaviour + noise(0.3),
        lag=torch.randint(0, 5, (count,), generator=generator),
        values=noise(1.0),
        advantages=noise(1.0),
        truncated=torch.rand(len(group), generator=generator) < 0.3,
    )


def rows_of(table: TokenTable, samples: Sequence[int]) -> Tensor:
    """Rows of the table that these samples hold, sample after sample."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *((table.sample == i).nonzero()[:, 0] for i in samples)])


def reordered(table: LossRows, order: Sequence[int]) -> tuple[LossRows, Tensor]:
    """The table with its samples, each an episode, in another order, and the old row of each new one."""
    where = rows_of(table, order)
    place = torch.empty(len(order), dtype=torch.int64)
    place[torch.tensor(list(order), dtype=torch.int64)] = torch.arange(len(order))
    moved = {
        name: column[torch.tensor(list(order))] if name in WHOLE else column[where]
        for name, column in table.columns().items()
        if column is not None
    }
    episode = torch.arange(len(order))
    return replace(LossRows(**moved), sample=place[table.sample][where], episode=episode), where


def with_empty(table: LossRows, group: int | None = None) -> LossRows:
    """One more sample, which wrote nothing; of a group of its own unless told otherwise."""
    return replace(
        table,
        episode=torch.arange(table.num_samples + 1),
        group=torch.cat([table.group, torch.tensor([table.num_groups if group is None else group])]),
        reward=torch.cat([table.reward, numbers([7.0])]),
        truncated=torch.cat([table.truncated, torch.tensor([False])]),
    )


def cut(trajectory: Trajectory, prompt: list[int], at: set[int]) -> Trajectory:
    """The same episode, with samples that begin at these turns: all before is read again, as context."""
    context, turns = list(prompt), []
    for place, turn in enumerate(trajectory.turns):
        context += turn.observation
        begins = place in at
        observation = list(context) if begins else turn.observation
        turns.append(Turn(observation, turn.completion, turn.reward, begins=begins, state=turn.state))
        context += turn.completion.token_ids
    return Trajectory(turns, trajectory.reward)


def said(*ids: int, finish: str = "stop", **turn) -> Turn:
    written = Completion(list(ids), [-0.5] * len(ids), [VersionSpan(0, 0, len(ids))] if ids else [], finish)
    return Turn(turn.pop("observation", []), written, **turn)


def table_of(*trajectories: Trajectory) -> TokenTable:
    return build_table([Group("g", 0, P, list(trajectories), "t")], 0)


# P | 4 o 5 (rewards 1 2), from behind 4 | 6 o 7 (4 8); and another episode, P | 9 (5)
TREE = Trajectory(
    [
        said(4, reward=1.0),
        said(5, observation=[0], reward=2.0),
        said(6, observation=[*P, 4, 0], begins=True, fork=0, reward=4.0),
        said(7, observation=[0], reward=8.0),
    ]
)
PLAIN = Trajectory([said(9, reward=5.0)])


def found(name: str, *trajectories: Trajectory, **params: float) -> list[float]:
    return advantage(name, **params)(table_of(*trajectories)).tolist()


def even(trees: Sequence[Trajectory], reward: float) -> list[Trajectory]:
    """Return the episodes with this reward alone, which all of their ways then have."""

    def bare(turn: Turn) -> Turn:
        return said(*turn.completion.token_ids, observation=turn.observation, begins=turn.begins, fork=turn.fork)

    return [Trajectory([bare(turn) for turn in tree.turns], reward) for tree in trees]


def constant_changes_nothing(name: str, trees: Sequence[Trajectory], shift: float) -> None:
    """Check it of a reward of all episodes, which comes once, at the end of every way."""
    shifted = [Trajectory(tree.turns, (tree.reward or 0.0) + shift) for tree in trees]
    assert found(name, *shifted) == pytest.approx(found(name, *trees), abs=1e-9)


@st.composite
def forests(draw: st.DrawFn) -> list[Trajectory]:
    """Episodes with forks, of few words and states, so that contexts meet."""
    quarter = st.integers(-8, 8).map(lambda n: n / 4)

    def way(length: int, **first: Any) -> list[Turn]:
        return [
            said(
                *draw(st.lists(st.integers(4, 5), min_size=1, max_size=2)),
                reward=draw(quarter),
                state=draw(st.sampled_from("abc")),
                **(first if n == 0 else {"observation": [0]}),
            )
            for n in range(length)
        ]

    made = []
    for _ in range(draw(st.integers(1, 4))):
        trunk = way(draw(st.integers(1, 3)))
        turns = list(trunk)
        for at in draw(st.lists(st.integers(0, len(trunk) - 1), max_size=2)):
            context = [*P, *(token for one in trunk[:at] for token in [*one.observation, *one.completion.token_ids])]
            context += trunk[at].observation
            turns += way(draw(st.integers(1, 3)), observation=context, begins=True, fork=at - 1)
        made.append(Trajectory(turns, draw(quarter)))
    return made


TWO = make([1, 2, 1, 1, 1, 3], [1.0, 0.0, 0.0, 0.0, 4.0, 1.0], [0, 0, 0, 0, 1, 1])
"""Two groups with rewards 1 0 0 0, and 4 and 1."""
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def estimated(name: str, table: LossRows, **settings: Any) -> list[float]:
    advantages = advantage(name, **settings)(table)
    assert advantages.dtype == torch.float64
    assert advantages.shape == (table.num_tokens,)
    return advantages.tolist()


def whitened(*values: float) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + WHITEN_EPSILON) for v in values]


def batch(lengths: list[int], old: list[float], advantages: list[float]) -> LossRows:
    """Tokens that engine and proximal policy gave these probabilities."""
    made = make(lengths, [0.0] * len(lengths), advantages=advantages)
    return replace(made, behaviour=logs(*old), proximal=logs(*old))


def both(name: str, logprobs: Tensor, rows: LossRows, **settings: Any) -> tuple[list[float], list[float]]:
    """Losses, and the gradient of their sum, per token."""
    leaf = logprobs.detach().clone().requires_grad_()
    losses = loss(name, **{**CLIP, **settings})(leaf, rows)
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.tolist(), leaf.grad.tolist()


def phi(weight: float, k: int, scale: int) -> float:
    return math.exp(scale) * weight**k * math.exp(-scale * weight)
