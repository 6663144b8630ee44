"""Conversion of received groups to token sequences to train on, and each token's share of the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.algo.table import TokenTable
from asyncrl.schema import POLICY, Group, Turn


@dataclass(frozen=True)
class Sample:
    """One token sequence after a prompt, or after a context of its own. `mask` marks the tokens that the policy wrote;
    only these are trained.

    Example: a tool's output [50, 51] between two completions [7, 8] and [9], the third sample of a batch:
        token_ids [7, 8, 50, 51, 9]   mask [1, 1, 0, 0, 1]   first_row 12: rows 12, 13 and 14 of the table
    """

    prompt_ids: list[int]  # [P]
    token_ids: list[int]  # [T]
    mask: list[bool]  # [T]
    number: int  # number of the sample in the table
    first_row: int  # row of its first trained token in the table
    images: tuple[str, ...] = ()  # names, in the order of the placeholders that the policy did not write
    rope: np.ndarray | None = None  # [3, P + T] position in time, height and width, if there are images
    keys: Tensor | None = None  # [P + T - 1] int64, number of each input token in an extension's index
    model: str = POLICY  # that it trains, of several

    @property
    def num_trained(self) -> int:
        """Number of tokens under the mask."""
        return sum(self.mask)

    @property
    def num_inputs(self) -> int:
        """Number of tokens before the last one under the mask, which is predicted from them; 0 if there is none."""
        if True not in self.mask:
            return 0
        after = self.mask[::-1].index(True)
        return len(self.prompt_ids) + len(self.mask) - 1 - after


def build_samples(groups: Sequence[Group], model_of: Callable[[str], str] = lambda role: POLICY) -> list[list[Sample]]:
    """Return the samples of each group, in the order of `build_table`. `model_of` returns the model that a
    role trains."""
    found: list[list[Sample]] = []
    number = row = 0
    for group in groups:
        found.append([])
        for turns in (turns for trajectory in group.trajectories for turns in trajectory.samples()):
            model = model_of(turns[0][1].role)
            found[-1].append(_sample(group, [turn for _, turn in turns], number, row, model))
            number, row = number + 1, row + found[-1][-1].num_trained
    return found


def _sample(group: Group, turns: Sequence[Turn], number: int, row: int, model: str) -> Sample:
    """Build one sample. If it starts a new context, that context replaces the prompt."""
    prompt_ids, images = group.prompt_ids, group.prompt_images
    token_ids: list[int] = []
    mask: list[bool] = []
    for turn in turns:
        observation = turn.observation
        if turn.begins:
            prompt_ids, observation, images = observation, [], []
        images = [*images, *turn.images]
        token_ids += [*observation, *turn.completion.token_ids]
        mask += [False] * len(observation) + [True] * len(turn.completion.token_ids)
    return Sample(prompt_ids, token_ids, mask, number, row, tuple(images), model=model)


def shares(table: TokenTable, samples: Iterable[Sample], aggregation: str, longest: int) -> Tensor:
    """Return each token's weight in the loss of one optimizer step over these samples, [N]; 0 for tokens of other
    samples.

    token:    loss = sum over tokens / N_tokens
    sequence: loss = sum over episodes of the mean over their tokens / N_episodes
    constant: loss = sum over tokens / (N_episodes * longest)      (Dr. GRPO, arXiv 2503.20783)

    The denominator counts every token, or every episode that has one, whether it will have a gradient or not. The
    division of an episode into samples changes no weight. Each model has a denominator of its own, as if it were
    trained alone.
    """
    by_model: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        by_model[sample.model].append(sample.number)
    weights = torch.zeros(table.num_tokens, dtype=torch.float64)
    for numbers in by_model.values():
        weights += _shares(table, numbers, aggregation, longest)
    return weights


def _shares(table: TokenTable, numbers: list[int], aggregation: str, longest: int) -> Tensor:
    """Return the weights in a loss over the samples with these numbers, [N]."""
    of_samples = torch.zeros(table.num_samples, dtype=torch.float64)
    of_samples[torch.tensor(numbers, dtype=torch.int64)] = 1.0
    chosen = of_samples[table.sample]
    lengths = table.sum_per_episode(chosen)
    count = max(1, _counted(lengths, aggregation))
    if aggregation == "token":
        return chosen / count
    if aggregation == "sequence":
        return chosen * table.per_token(1.0 / (lengths.clamp(min=1) * count))
    return chosen / (count * longest)


def denominator(table: TokenTable, aggregation: str) -> int:
    """Return what the denominator of a step over the whole table counts: its tokens, or its episodes that have one. The
    weight of a token times this is the same in every step that contains it."""
    return _counted(table.sum_per_episode(torch.ones(table.num_tokens, dtype=torch.float64)), aggregation)


def _counted(lengths: Tensor, aggregation: str) -> int:
    return int(lengths.sum() if aggregation == "token" else (lengths > 0).sum())
